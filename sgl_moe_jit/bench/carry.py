# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m sgl_moe_jit.bench.carry flashinfer DIR``: a peer's files for a machine without it.

Copies the few files of an installed flashinfer that its two kernels here are compiled from, as the
compiler's own dependency list names them, and keeps the tree of folders. ``bench`` takes the folder
by ``--peer flashinfer=DIR``. The files stay flashinfer's; do not commit them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sgl_moe_jit.bench.kernels import FLASHINFER_FLAGS, FLASHINFER_SOURCES, flashinfer_includes
from sgl_moe_jit.jit import CudaArch, paths, toolchain
from sgl_moe_jit.jit.dependencies import find_cutlass, package_dir

_USAGE = "usage: python -m sgl_moe_jit.bench.carry flashinfer DIR"


def dependencies_of(source: Path, data: Path) -> list[Path]:
    """Return every file below ``data`` that compiling ``source`` for sm_90a reads.

    Raises:
        ToolchainError: there is no nvcc.
        CalledProcessError: the source does not compile that far.
    """
    nvcc = toolchain.require_cuda_toolkit().nvcc
    folders = [paths.csrc_dir(), paths.include_dir(), *flashinfer_includes(data)]
    folders += find_cutlass().include_dirs
    flags = [word for folder in folders for word in ("-I", str(folder))]
    arch = CudaArch.parse("9.0a").gencode()
    done = subprocess.run(
        [str(nvcc), "-std=c++17", arch, *FLASHINFER_FLAGS, *flags, "-M", str(source)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # Make's format: a colon after the target, a backslash at a line's end.
    words = done.stdout.split(":", 1)[1].replace("\\\n", " ").split()
    files = (Path(word).resolve() for word in words)
    return sorted({file for file in files if file.is_relative_to(data)})


def carry_flashinfer(target: Path) -> list[Path]:
    """Copy the files; return them, relative to ``target``.

    Raises:
        FileNotFoundError: flashinfer is not installed.
    """
    package = package_dir("flashinfer")
    if package is None or not (package / "data").is_dir():
        raise FileNotFoundError(
            "flashinfer is not installed. Install it with: pip install --no-deps flashinfer-python"
        )
    data = (package / "data").resolve()
    found: set[Path] = set()
    for source in FLASHINFER_SOURCES:
        found.update(dependencies_of(paths.csrc_dir() / source, data))
    relative = sorted(file.relative_to(data) for file in found)
    for file in relative:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data / file, target / file)
    (target / "version.txt").write_text(version("flashinfer-python") + "\n", encoding="utf-8")
    return relative


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    if len(argv) != 2 or argv[0] != "flashinfer":
        print(_USAGE, file=sys.stderr)
        return 2
    target = Path(argv[1])
    files = carry_flashinfer(target)
    size = sum((target / file).stat().st_size for file in files)
    print(f"{len(files)} files, {size / 1024:.0f} KB, in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
