# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The build cache: which built module, if any, is still exact.

``<root>/<label>/<key>/<leaf>/`` holds ``module.so`` and ``manifest.json``. The key is known before
a build: command lines, source contents, versions, target, machine. The manifest records what only
the compiler knows: every file it read, by content, and the compilers themselves. A leaf is a hit
when all of that still holds. Looking up starts no process. Known gap: a header that newly appears
earlier on the include path is not seen until one of the recorded files changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_moe_jit.errors import ToolchainError
from sgl_moe_jit.jit import paths, toolchain
from sgl_moe_jit.jit.build import BuildResult, Tools
from sgl_moe_jit.jit.spec import BuildSpec

logger = logging.getLogger("sgl_moe_jit.jit")

_FORMAT = 1


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _file_digest(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None


def environment() -> dict[str, str]:
    """Return what besides the command lines decides whether a binary fits this process."""
    import torch
    import tvm_ffi

    libc = os.confstr("CS_GNU_LIBC_VERSION") if hasattr(os, "confstr") else None
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "cxx11_abi": str(torch.compiled_with_cxx11_abi()),
        "tvm_ffi": str(tvm_ffi.__version__),
        "os": sys.platform,
        "machine": platform.machine(),
        "libc": str(libc),
    }


def key_of(build: BuildSpec) -> str:
    """Return the part of a module's identity that is known before it is built."""
    roots = dict(build.roots)

    def source_digest(source: str) -> str | None:
        _, root, rest = source.split("/", 2)
        return _file_digest(roots[root] / rest)

    text = json.dumps(
        {
            "format": _FORMAT,
            "name": build.name,
            "units": [
                [u.command, u.text if u.text is not None else source_digest(u.source)]
                for u in build.units
            ],
            "link": build.link,
            "dependencies": [[d.name, d.provider, d.version] for d in build.dependencies],
            "arch": build.arch.name if build.arch else None,
            "environment": environment(),
        },
        sort_keys=True,
    )
    return _digest(text.encode())


def _compiler_record(path: Path) -> dict[str, Any]:
    real = path.resolve()
    stat = real.stat()
    return {
        "path": str(real),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "digest": _file_digest(real),
    }


def _compiler_unchanged(record: dict[str, Any], path: Path) -> bool:
    """Whether the compiler at ``path`` is the recorded one. nvcc is 30 MB: read it only when in doubt."""
    try:
        real = path.resolve()
        stat = real.stat()
    except OSError:
        return False
    if str(real) == record["path"] and (stat.st_size, stat.st_mtime_ns) == (
        record["size"],
        record["mtime_ns"],
    ):
        return True
    return stat.st_size == record["size"] and _file_digest(real) == record["digest"]


@dataclass(frozen=True)
class Present:
    """The compilers this process would use, as files; None where there is none."""

    host: Path | None
    nvcc: Path | None

    @classmethod
    def look(cls, build: BuildSpec) -> Present:
        """Look without starting a process. A variable that names no compiler counts as none."""
        try:
            host = toolchain.locate_host_compiler()
            nvcc = toolchain.locate_nvcc() if build.uses_cuda else None
        except ToolchainError:
            return cls(None, None)
        return cls(host.path if host else None, nvcc.path if nvcc else None)


def _leaf_fits(manifest: dict[str, Any], build: BuildSpec, present: Present) -> bool:
    compilers = manifest["compilers"]
    pairs = [(compilers["host"], present.host), (compilers.get("nvcc"), present.nvcc)]
    if not all(_compiler_unchanged(r, p) for r, p in pairs if r is not None and p is not None):
        return False
    behind = compilers.get("nvcc_behind_wrapper")
    if (
        present.nvcc is not None
        and behind is not None
        and not _compiler_unchanged(behind, Path(behind["path"]))
    ):
        return False
    # Without a compiler nothing could be rebuilt, and its headers are usually gone with it (slim
    # runtime images): then only the files that come with Python packages are compared.
    complete = present.host is not None and (present.nvcc is not None or not build.uses_cuda)
    roots = dict(build.roots)
    for name, digest in manifest["files"].items():
        if name.startswith("roots/"):
            _, root, rest = name.split("/", 2)
            if root not in roots:  # the toolkit's own headers
                continue
            path = roots[root] / rest
        elif complete:
            path = Path(name)
        else:
            continue
        if _file_digest(path) != digest:
            logger.debug("%s: %s changed", build.label, path)
            return False
    return True


def find(build: BuildSpec, key: str) -> Path | None:
    """Return the ``module.so`` of a leaf that is still exact, newest first, or None."""
    folder = paths.cache_root() / build.label / key
    try:
        leaves = sorted(folder.iterdir(), key=lambda leaf: leaf.stat().st_mtime_ns, reverse=True)
    except OSError:
        return None
    present = Present.look(build)
    for leaf in leaves:
        try:
            manifest = json.loads((leaf / "manifest.json").read_text(encoding="utf-8"))
            whole = (leaf / "module.so").stat().st_size == manifest["module_size"]
            if whole and _leaf_fits(manifest, build, present):
                return leaf / "module.so"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("ignoring a damaged cache entry %s: %s", leaf, error)
    return None


def new_staging() -> Path:
    """Make and return a folder that only this call uses, on the cache's own file system."""
    folder = paths.cache_root() / "staging" / f"{os.getpid()}-{secrets.token_hex(6)}"
    folder.mkdir(parents=True)
    return folder


def write_manifest(build: BuildSpec, tools: Tools, result: BuildResult) -> str:
    """Write ``manifest.json`` beside a built module and return the leaf's name."""
    staging = result.module.parent
    files = {}
    for name in result.dependencies:
        # Names below roots/cuda are the toolkit's; record where they really are.
        path = staging / name
        if name.startswith("roots/cuda/") and tools.cuda is not None:
            name = str(path.resolve())
        files[name] = _file_digest(path)
    compilers: dict[str, Any] = {"host": _compiler_record(tools.host.path)}
    if tools.cuda is not None:
        compilers["nvcc"] = _compiler_record(tools.cuda.nvcc)
        if tools.cuda.real_nvcc.resolve() != tools.cuda.nvcc.resolve():
            compilers["nvcc_behind_wrapper"] = _compiler_record(tools.cuda.real_nvcc)
    manifest = {
        "module_size": result.module.stat().st_size,
        "files": dict(sorted(files.items())),
        "compilers": compilers,
        "commands": [tools.fill(unit.command) for unit in build.units] + [tools.fill(build.link)],
        "environment": environment(),
        "cutlass": [f"{d.provider} {d.version}" for d in build.dependencies],
    }
    text = json.dumps(manifest, indent=1)
    (staging / "manifest.json").write_text(text, encoding="utf-8")
    digests = json.dumps([manifest["files"], {k: v["digest"] for k, v in compilers.items()}])
    return _digest(digests.encode())[:16]


def publish(build: BuildSpec, key: str, leaf: str, staging: Path) -> Path:
    """Rename a loaded build to its place and return its module there.

    Losing the race to another process is winning: its module is the same, and stays.
    """
    for entry in staging.iterdir():
        if entry.name not in ("module.so", "manifest.json"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with (staging / "module.so").open("rb") as module:
        os.fsync(module.fileno())
    target = paths.cache_root() / build.label / key / leaf
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Rename, not copy: readers take no lock, so a half-written module must never be visible.
        staging.rename(target)
    except OSError:
        if not (target / "module.so").is_file():
            raise
        shutil.rmtree(staging, ignore_errors=True)
    return target / "module.so"


def discard(module: Path, reason: Exception) -> None:
    """Move an entry that does not load out of the way, so that the next lookup rebuilds it."""
    logger.warning("%s does not load (%s); rebuilding it", module, reason)
    grave = paths.cache_root() / "staging" / f"bad-{secrets.token_hex(6)}"
    try:
        grave.parent.mkdir(parents=True, exist_ok=True)
        module.parent.rename(grave)
    except OSError:
        return
    shutil.rmtree(grave, ignore_errors=True)
