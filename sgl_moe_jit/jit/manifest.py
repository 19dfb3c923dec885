# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a built module was made from, and whether all of it is still the same.

The manifest records what only a build knows: every file that compilers and linker read, by content,
and the compilers themselves. Comparing starts no process. Known gap: a header or library that newly
appears earlier on a search path is not seen until one of the recorded files changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_moe_jit.errors import ToolchainError
from sgl_moe_jit.jit import toolchain
from sgl_moe_jit.jit.build import BuildResult, Tools
from sgl_moe_jit.jit.spec import BuildSpec

logger = logging.getLogger("sgl_moe_jit.jit")

# Variables that gcc, clang and nvcc read: they reach the compiler without a command line.
_COMPILER_VARIABLES = (
    "COMPILER_PATH",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "GCC_EXEC_PREFIX",
    "LIBRARY_PATH",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
)


def digest(data: bytes) -> str:
    """Return 32 hexadecimal digits that stand for ``data``."""
    return hashlib.sha256(data).hexdigest()[:32]


def file_digest(path: Path) -> str | None:
    """Return a file's digest, or None when it cannot be read."""
    try:
        return digest(path.read_bytes())
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
        **{name: os.environ[name] for name in _COMPILER_VARIABLES if os.environ.get(name)},
    }


def _large_record(path: Path) -> dict[str, Any]:
    real = path.resolve()
    stat = real.stat()
    return {
        "path": str(real),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "digest": file_digest(real),
    }


def _large_unchanged(record: dict[str, Any], path: Path) -> bool:
    """Whether the compiler or system library at ``path`` is the recorded one.

    nvcc has 30 MB, so such a file is read only when its place or time differs.
    """
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
    same_size: bool = stat.st_size == record["size"]
    return same_size and file_digest(real) == record["digest"]


def _comes_with_system(path: Path) -> bool:
    """Whether a file the linker read is compared as compilers are, and not read at each lookup.

    Of shared libraries nothing but names gets into a module.
    """
    return ".so" in path.name or str(path).startswith(("/usr/", "/lib"))


def _locate(name: str, roots: dict[str, Path]) -> Path | None:
    """Return where a recorded file lies now; None for one of the toolkit's own folders."""
    if not name.startswith("roots/"):
        return Path(name)
    _, root, rest = name.split("/", 2)
    return roots[root] / rest if root in roots else None


@dataclass(frozen=True)
class Present:
    """The compilers this process would use, as files; None where there is none."""

    host: toolchain.HostCompiler | None
    nvcc: Path | None

    @classmethod
    def look(cls, build: BuildSpec) -> Present:
        """Look without starting a process.

        A variable that names no compiler counts as none, and so does a compiler that lacks the
        headers of Python which an extension needs.
        """
        python = dict(build.roots).get("python")
        if python is not None and not (python / "Python.h").is_file():
            return cls(None, None)
        try:
            host = toolchain.locate_host_compiler()
            nvcc = toolchain.locate_nvcc() if build.uses_cuda else None
        except ToolchainError:
            return cls(None, None)
        return cls(host, nvcc.path if nvcc else None)


def fits(manifest: dict[str, Any], build: BuildSpec, present: Present) -> bool:
    """Whether every file and compiler that ``manifest`` records is still as it was.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: ``manifest`` is not one that
            :func:`write` wrote.
    """
    compilers = manifest["compilers"]
    pairs: list[tuple[dict[str, Any], Path]] = []
    if present.host is not None:
        pairs.append((compilers["host"], present.host.path))
        if manifest["host_flags"] != list(present.host.flags):
            return False
    if present.nvcc is not None:
        pairs.append((compilers["nvcc"], present.nvcc))
        behind = compilers.get("nvcc_behind_wrapper")
        if behind is not None:
            pairs.append((behind, Path(behind["path"])))
    if not all(_large_unchanged(record, path) for record, path in pairs):
        return False
    # Without a compiler nothing could be rebuilt, and its headers are usually gone with it (slim
    # runtime images): then only the files that come with Python packages are compared.
    complete = present.host is not None and (present.nvcc is not None or not build.uses_cuda)
    roots = dict(build.roots)
    for name, digest in manifest["files"].items():
        packaged = name.startswith("roots/") and not name.startswith("roots/python/")
        path = _locate(name, roots) if complete or packaged else None
        if path is not None and file_digest(path) != digest:
            logger.debug("%s: %s changed", build.label, path)
            return False
    for name, record in manifest["libraries"].items() if complete else ():
        path = _locate(name, roots)
        if path is not None and not _large_unchanged(record, path):
            logger.debug("%s: %s changed", build.label, path)
            return False
    return True


def write(build: BuildSpec, tools: Tools, result: BuildResult) -> str:
    """Write ``manifest.json`` beside a built module and return the leaf's name."""
    staging = result.module.parent
    files, libraries = {}, {}
    for name in (*result.dependencies, *result.linked):
        path = staging / name
        real = path.resolve()
        # Names below these roots are the toolkit's; record where they really are.
        key = str(real) if name.startswith(("roots/cuda/", "roots/cudart/")) else name
        if name in result.linked and real.is_file() and _comes_with_system(real):
            libraries[key] = _large_record(real)
        else:
            files[key] = file_digest(path)
    compilers: dict[str, Any] = {"host": _large_record(tools.host.path)}
    if tools.cuda is not None:
        compilers["nvcc"] = _large_record(tools.cuda.nvcc)
        if tools.cuda.real_nvcc.resolve() != tools.cuda.nvcc.resolve():
            compilers["nvcc_behind_wrapper"] = _large_record(tools.cuda.real_nvcc)
    manifest = {
        "module": file_digest(result.module),
        "files": dict(sorted(files.items())),
        "libraries": dict(sorted(libraries.items())),
        "compilers": compilers,
        "host_flags": list(tools.host.flags),
        "commands": [tools.fill(unit.command) for unit in build.units] + [tools.fill(build.link)],
        "environment": environment(),
        "cutlass": [f"{d.provider} {d.version}" for d in build.dependencies],
    }
    text = json.dumps(manifest, indent=1)
    (staging / "manifest.json").write_text(text, encoding="utf-8")
    # Everything a lookup compares is in the name, or a rebuild could not take a stale leaf's place.
    compared: list[Any] = [manifest["files"], manifest["host_flags"]]
    compared += [{k: v["digest"] for k, v in part.items()} for part in (compilers, libraries)]
    return digest(json.dumps(compared).encode())[:16]


def changed_during(result: BuildResult) -> list[str]:
    """Return the files that changed, or went, while a build ran. Call it after :func:`write`.

    Such a file may have been read before its change and recorded after it. The inode's time is
    compared: nobody can set it back, and an unpacked file from the future does not count.
    """
    changed = []
    for name in (*result.dependencies, *result.linked):
        path = result.module.parent / name
        try:
            if path.stat().st_ctime_ns > result.started_ns:
                changed.append(str(path.resolve()))
        except OSError:
            changed.append(name)
    return changed
