# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the library, declared once: name, type, default, one line.

Values are read on each use, so a test or a notebook may change them. Nonsense is rejected by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("one of 1/0, true/false, yes/no, on/off")


def _parse_positive_int(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("an integer >= 1")
    return int(text)


def _parse_path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises without a HOME


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text.strip().lower()

    return parse


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable.

    Attributes:
        name: The variable's name.
        default: Value when the variable is unset or empty.
        parse: Turns text into a value; raises ``ValueError`` whose text names what is expected.
        doc: One line for the README's table.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    doc: str

    def get(self) -> T:
        """Return the current value.

        Raises:
            ValueError: the text is not of this variable's type; names variable and text.
        """
        text = os.environ.get(self.name, "")
        if not text.strip():
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}: expected {error}, got {text!r}") from None


CACHE_DIR: EnvVar[Path | None] = EnvVar(
    "SGL_MOE_JIT_CACHE_DIR",
    None,
    _parse_path,
    "Folder of built modules. Unset: `$XDG_CACHE_HOME/sgl_moe_jit`, else `~/.cache/sgl_moe_jit`.",
)
CUDA_ARCH: EnvVar[str | None] = EnvVar(
    "SGL_MOE_JIT_CUDA_ARCH",
    None,
    str,
    "CUDA target (`9.0a`), read at a kernel's first load. Unset: the tensor's device decides.",
)
MAX_JOBS: EnvVar[int | None] = EnvVar(
    "SGL_MOE_JIT_MAX_JOBS",
    None,
    _parse_positive_int,
    "Compiler processes side by side in one build. Unset: one a core.",
)
ENABLE_DEFERRED_FINALIZE: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE",
    True,
    _parse_bool,
    "Off: `deferred_finalize_context` asks for nothing; runners finish their own output.",
)
PDL: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_PDL",
    True,
    _parse_bool,
    "Off: never launch with programmatic dependent launch. Same bits.",
)
VECTOR: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_VECTOR",
    True,
    _parse_bool,
    "Off: always take the scalar path. Same bits.",
)
CHECK_INDICES: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_CHECK_INDICES",
    False,
    _parse_bool,
    "On: CUDA calls check every index against the row count (synchronises; not in a capture).",
)
CPU_ISA: EnvVar[str] = EnvVar(
    "SGL_MOE_JIT_CPU_ISA",
    "auto",
    _one_of("auto", "portable", "avx2", "avx512"),
    "Instruction set of the CPU kernels: `auto`, `portable`, `avx2` or `avx512`. Same bits.",
)


def all_variables() -> tuple[EnvVar[object], ...]:
    """Return every variable declared here, in order of declaration."""
    return tuple(value for value in globals().values() if isinstance(value, EnvVar))
