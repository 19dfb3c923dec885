# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Compilers: where they are, and what belongs to them.

Locating looks at files only, so a cache hit may do it. Resolving runs the compiler, so only a build
or ``doctor`` does it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.errors import ToolchainError

_PIP_COMMAND = "pip install 'sgl-moe-jit[nvcc]'"
_DEFAULT_ROOT = Path("/usr/local/cuda")
# Programs that stand before the compiler in CXX and start it.
_LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc", "env"})


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: ``argv`` starts it (``CXX="ccache g++"`` has two words).

    Attributes:
        argv: What to run.
        path: The compiler itself, in the example g++.
        how: How it was found.
        flags: The words of ``argv`` that change what it makes: neither compiler nor launcher.
    """

    argv: tuple[str, ...]
    path: Path
    how: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocatedNvcc:
    """An ``nvcc`` file and how it was found. It may be a wrapper script."""

    path: Path
    how: str


@dataclass(frozen=True)
class CudaToolkit:
    """A complete toolkit.

    Attributes:
        nvcc: What to run; may be a wrapper.
        root: The toolkit's folder, as the compiler itself sees it.
        include: Folder of ``cuda_runtime.h``.
        lib: Folder of the CUDA runtime library.
        cudart: Linker argument, ``-lcudart`` or ``-l:libcudart.so.13``.
        cudart_path: The shared library's file.
        version: ``(major, minor)`` of nvcc.
        how: How nvcc was found.
    """

    nvcc: Path
    root: Path
    include: Path
    lib: Path
    cudart: str
    cudart_path: Path
    version: tuple[int, int]
    how: str

    @property
    def real_nvcc(self) -> Path:
        """The compiler behind a wrapper, else ``nvcc`` itself."""
        behind = self.root / "bin" / "nvcc"
        return behind if behind.is_file() else self.nvcc


def _parse_cxx(text: str) -> HostCompiler:
    try:
        argv = tuple(shlex.split(text))
    except ValueError as error:
        raise ToolchainError(
            f"CXX: expected a command line, got {text!r}: {str(error).lower()}"
        ) from None
    launched = False
    flags: list[str] = []
    for i, word in enumerate(argv):
        if Path(word).name in _LAUNCHERS:
            launched = True
            continue
        path = None if word.startswith("-") else shutil.which(word)
        if path is not None:
            return HostCompiler(argv, Path(path), "CXX", (*flags, *argv[i + 1 :]))
        if not launched:
            break
        flags.append(word)  # a launcher's option, or a variable that env sets
    raise ToolchainError(f"CXX: expected a C++ compiler on PATH, got {text!r}")


def locate_host_compiler() -> HostCompiler | None:
    """Return ``$CXX``, else the first of g++, c++, clang++ on PATH. Starts no process.

    Raises:
        ToolchainError: ``CXX`` is set and names no compiler.
    """
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        return _parse_cxx(chosen)
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return HostCompiler((path,), Path(path), "PATH")
    return None


def require_host_compiler() -> HostCompiler:
    """Return the host compiler.

    Raises:
        ToolchainError: none was found.
    """
    found = locate_host_compiler()
    if found is None:
        raise ToolchainError(
            "no C++ compiler found: looked at $CXX and for g++, c++, clang++ on PATH. "
            "Install one (Debian: apt-get install g++) or set CXX."
        )
    return found


def pip_roots() -> Iterator[Path]:
    """Yield toolkit roots inside the ``nvidia`` namespace package, CUDA 13 layout first."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return
    for base in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(base).glob("cu[0-9]*"), reverse=True)
        yield Path(base) / "cuda_nvcc"


def nvcc_places() -> list[tuple[str, Path | None]]:
    """Return every place searched for nvcc, in order, as ``(how, file or None)``."""
    places: list[tuple[str, Path | None]] = []
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(name, "").strip()
        places.append((name, Path(value) / "bin" / "nvcc" if value else None))
    on_path = shutil.which("nvcc")
    places.append(("PATH", Path(on_path) if on_path else None))
    places.extend(("pip", root / "bin" / "nvcc") for root in pip_roots())
    places.append(("default", _DEFAULT_ROOT / "bin" / "nvcc"))
    return places


def locate_nvcc() -> LocatedNvcc | None:
    """Return the first nvcc of :func:`nvcc_places`. Starts no process.

    Raises:
        ToolchainError: ``CUDA_HOME`` or ``CUDA_PATH`` is set and holds no ``bin/nvcc``.
    """
    for how, path in nvcc_places():
        if path is None:
            continue
        if path.is_file() and os.access(path, os.X_OK):
            return LocatedNvcc(path, how)
        if how in ("CUDA_HOME", "CUDA_PATH"):
            raise ToolchainError(
                f"{how}={os.environ[how]!r}: expected bin/nvcc in it. Point it at a CUDA toolkit, "
                "or unset it to search PATH and pip packages."
            )
    return None


def missing_nvcc_message() -> str:
    """Say where nvcc was looked for and how to get one."""
    lines = ["no CUDA compiler (nvcc) found. Searched:"]
    for how, path in nvcc_places():
        lines.append(
            f"  {how}: {path if path is not None else 'not set' if how != 'PATH' else 'no nvcc'}"
        )
    if not any(how == "pip" for how, _ in nvcc_places()):
        lines.append("  pip: no nvidia/cu*/bin and no nvidia/cuda_nvcc/bin")
    lines.append(f"Install one with: {_PIP_COMMAND}   or set CUDA_HOME to a CUDA toolkit.")
    return "\n".join(lines)


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{shlex.join(argv)}: {error}") from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-400:]
        raise ToolchainError(f"{shlex.join(argv)}: exit status {done.returncode}: {tail}")
    return done.stdout + done.stderr


def _include_dir(root: Path) -> Path | None:
    for folder in (root / "include", *sorted(root.glob("targets/*/include"))):  # the latter: conda
        if (folder / "cuda_runtime.h").is_file():
            return folder
    return None


def _toolkit_root(nvcc: Path) -> tuple[Path, Path]:
    """Return the root nvcc compiles with, and its headers.

    That is nvcc's own parent, or, when nvcc is a wrapper elsewhere, what the compiler itself says.
    """
    guess = nvcc.resolve().parent.parent
    include = _include_dir(guess)
    if include is not None:
        return guess, include
    match = re.search(
        r"^#\$ TOP=(.*)$", _run([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull]), re.M
    )
    if match:
        top = Path(match.group(1).strip()).resolve()
        include = _include_dir(top)
        if include is not None:
            return top, include
        raise ToolchainError(
            f"{nvcc}: its toolkit {top} has no include/cuda_runtime.h. Install the CUDA runtime "
            f"headers (package cuda-cudart-dev, or {_PIP_COMMAND})."
        )
    raise ToolchainError(f"{nvcc}: `nvcc --dryrun` names no toolkit (no TOP= line); set CUDA_HOME")


def cuda_roots() -> list[Path]:
    """Return the folders a CUDA runtime may lie in, most likely first. Starts no process."""
    return [path.parent.parent for _, path in nvcc_places() if path is not None]


def library_dirs(root: Path) -> list[Path]:
    """Return where a toolkit keeps its libraries: system, pip wheel, conda."""
    return [root / "lib64", root / "lib", *sorted(root.glob("targets/*/lib"))]


def find_cudart(root: Path, major: int) -> tuple[Path, str, Path]:
    """Return ``(folder, linker argument, file)`` of the CUDA runtime below a toolkit root.

    Raises:
        ToolchainError: no folder holds one; lists the folders tried.
    """
    folders = library_dirs(root)
    for folder in folders:
        if (folder / "libcudart.so").exists():
            return folder, "-lcudart", folder / "libcudart.so"
    for folder in folders:
        versioned = folder / f"libcudart.so.{major}"
        if versioned.exists():
            return folder, f"-l:{versioned.name}", versioned
    tried = ", ".join(map(str, folders))
    raise ToolchainError(f"no libcudart.so or libcudart.so.{major} in: {tried}. {_PIP_COMMAND}")


def require_cuda_toolkit() -> CudaToolkit:
    """Find nvcc and check that everything a build needs lies with it. Runs nvcc.

    Raises:
        ToolchainError: no nvcc (lists the places searched), or its toolkit lacks a part (names it).
    """
    located = locate_nvcc()
    if located is None:
        raise ToolchainError(missing_nvcc_message())
    root, include = _toolkit_root(located.path)
    match = re.search(r"release (\d+)\.(\d+)", _run([str(located.path), "--version"]))
    if match is None:
        raise ToolchainError(f"{located.path}: `nvcc --version` names no release")
    version = (int(match.group(1)), int(match.group(2)))
    lib, cudart, cudart_path = find_cudart(root, version[0])
    return CudaToolkit(located.path, root, include, lib, cudart, cudart_path, version, located.how)
