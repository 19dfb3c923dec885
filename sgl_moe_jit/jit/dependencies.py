# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Header dependencies by name: where they lie, and which version that is.

CUTLASS is looked up as files. The import name ``cutlass`` belongs to unrelated packages and is
never imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.errors import DependencyError


@dataclass(frozen=True)
class Dependency:
    """Headers found for a name.

    Attributes:
        name: What was asked for, such as ``cutlass``.
        provider: Who ships them, such as ``nvidia-cutlass``.
        version: As the headers themselves say.
        include_dirs: For the compiler, in order.
    """

    name: str
    provider: str
    version: str
    include_dirs: tuple[Path, ...]


def package_dir(module: str) -> Path | None:
    """Return a top-level package's folder without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


_CUTLASS_PROVIDERS = ("CUTLASS_PATH", "nvidia-cutlass", "flashinfer")


def _cutlass_candidates() -> Iterator[tuple[str, Path | None]]:
    chosen = os.environ.get("CUTLASS_PATH", "").strip()
    yield "CUTLASS_PATH", Path(chosen) if chosen else None
    library = package_dir("cutlass_library")
    yield "nvidia-cutlass", library / "source" if library else None
    flashinfer = package_dir("flashinfer")
    yield "flashinfer", flashinfer / "data" / "cutlass" if flashinfer else None


def _cutlass_version(include: Path) -> str:
    text = (include / "cutlass" / "version.h").read_text(encoding="utf-8")
    parts = [re.search(rf"#define CUTLASS_{p}\s+(\d+)", text) for p in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(m.group(1) if m else "?" for m in parts)


def find_cutlass(provider: str | None = None) -> Dependency:
    """Return the CUTLASS headers.

    Args:
        provider: ``CUTLASS_PATH``, ``nvidia-cutlass`` or ``flashinfer``; None takes the first
            found.

    Raises:
        ValueError: unknown provider.
        DependencyError: none found; lists the places and the pip command.
    """
    if provider is not None and provider not in _CUTLASS_PROVIDERS:
        raise ValueError(
            f"cutlass: expected a provider of {', '.join(_CUTLASS_PROVIDERS)}, got {provider!r}"
        )
    tried = []
    for who, base in _cutlass_candidates():
        if provider is not None and who != provider:
            continue
        tried.append(
            f"  {who}: {base if base else 'not installed' if who != 'CUTLASS_PATH' else 'not set'}"
        )
        include = base / "include" if base else None
        if include is not None and (include / "cutlass" / "cutlass.h").is_file():
            util = include.parent / "tools" / "util" / "include"
            dirs = (include, util) if util.is_dir() else (include,)
            return Dependency("cutlass", who, _cutlass_version(include), dirs)
        if who == "CUTLASS_PATH" and base is not None:
            raise DependencyError(f"CUTLASS_PATH={base}: expected include/cutlass/cutlass.h in it")
    raise DependencyError(
        "CUTLASS headers not found (include/cutlass/cutlass.h). Searched:\n"
        + "\n".join(tried)
        + "\nInstall them with: pip install nvidia-cutlass   (not `cutlass`, an unrelated package)"
    )


def find_dependency(name: str) -> Dependency:
    """Return the headers of ``cutlass``, or of ``cutlass:<provider>``.

    Raises:
        ValueError: unknown name or provider.
        DependencyError: not found.
    """
    base, _, provider = name.partition(":")
    if base != "cutlass":
        raise ValueError(f"extra_dependencies: expected 'cutlass', got {name!r}")
    return find_cutlass(provider or None)
