# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What is on this machine, one probe a subject. What a probe raises becomes a report line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sgl_moe_jit import __version__, env
from sgl_moe_jit.errors import ToolchainError
from sgl_moe_jit.jit import arch, dependencies, paths, toolchain

Facts = dict[str, Any]

# Beside our own variables, those that choose a compiler or headers. Values of no others are shown.
_FOREIGN_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CXX", "CUTLASS_PATH")

# Needs libc's and libstdc++'s headers and, to link, the crt files: what slim images lack.
_TINY_SOURCE = """#include <cstdlib>
#include <string>
extern "C" int f() { return std::string("x").size() + std::abs(-1); }
"""


def package_version(distribution: str, module: str) -> str | None:
    """Return a package's version without importing it; ``found`` when it has no metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "found" if importlib.util.find_spec(module) is not None else None


def probe_system() -> Facts:
    """Python, operating system, machine."""
    return {
        "sgl_moe_jit": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "os": platform.platform(),
        "machine": platform.machine(),
    }


def probe_cpu() -> Facts:
    """Cores, and the instruction set the CPU kernels will take."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    flags = set(found.group(1).split()) if found else set()
    widest = "portable"
    if {"fma", "avx2"} <= flags:
        widest = "avx2"
    if {"fma", "avx512f", "avx512bw", "avx512vl"} <= flags:
        widest = "avx512"
    chosen = env.CPU_ISA.get()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": widest if chosen == "auto" else f"{chosen} ({env.CPU_ISA.name})",
    }


def probe_torch() -> Facts:
    """Version, and the CUDA version it was built with."""
    import torch

    return {"version": str(torch.__version__), "cuda": torch.version.cuda}


def probe_gpu() -> Facts:
    """GPUs torch sees, the driver, and the target kernels are built for."""
    import torch

    facts: Facts = {"devices": [], "target": None, "driver": None}
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text(encoding="utf-8"))
        facts["driver"] = found.group(1) if found else "found"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            facts["devices"].append({"name": name, "capability": f"{major}.{minor}"})
    if facts["devices"] or env.CUDA_ARCH.get() is not None:
        try:
            facts["target"] = arch.current_arch().name
        except ValueError as error:
            facts["target_error"] = str(error)
    return facts


def probe_host_compiler() -> Facts:
    """The C++ compiler, and whether it makes a shared library.

    Raises:
        ToolchainError: there is none, or it does not work.
    """
    found = toolchain.require_host_compiler()
    with tempfile.TemporaryDirectory(prefix="sgl_moe_jit-doctor-") as folder:
        source = Path(folder) / "tiny.cc"
        source.write_text(_TINY_SOURCE, encoding="utf-8")
        command = [
            *found.argv,
            "-std=c++17",
            "-fPIC",
            "-shared",
            str(source),
            "-o",
            f"{folder}/tiny.so",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
        if done.returncode != 0:
            lines = [
                line for line in done.stderr.splitlines() if "error" in line or "cannot" in line
            ]
            raise ToolchainError(
                f"{found.path} cannot build a shared library: {(lines or ['no message'])[0]}. "
                "Install the C++ standard library's headers (Debian: apt-get install g++)."
            )
    shown = subprocess.run(
        [*found.argv, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return {
        "path": str(found.path),
        "found_by": found.how,
        "version": (shown.stdout.splitlines() or ["unknown"])[0],
    }


def probe_nvcc() -> Facts:
    """nvcc, how it was found, and the toolkit it compiles with.

    Raises:
        ToolchainError: there is none, or its toolkit lacks a part.
    """
    toolkit = toolchain.require_cuda_toolkit()
    shown = subprocess.run(
        [str(toolkit.nvcc), "--list-gpu-code"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return {
        "path": str(toolkit.nvcc),
        "found_by": toolkit.how,
        "version": ".".join(map(str, toolkit.version)),
        "toolkit": str(toolkit.root),
        "cudart": str(toolkit.cudart_path),
        "targets": sorted(set(re.findall(r"sm_\d+", shown.stdout)), key=lambda s: int(s[3:])),
    }


def probe_cutlass() -> Facts:
    """CUTLASS headers.

    Raises:
        DependencyError: not found.
    """
    found = dependencies.find_cutlass()
    return {
        "provider": found.provider,
        "version": found.version,
        "include": str(found.include_dirs[0]),
    }


def probe_packages() -> Facts:
    """Versions of the Python packages that matter, None where absent. Nothing is imported."""
    return {
        "apache-tvm-ffi": package_version("apache-tvm-ffi", "tvm_ffi"),
        "transformers": package_version("transformers", "transformers"),
        "flashinfer": package_version("flashinfer-python", "flashinfer"),
        "triton": package_version("triton", "triton"),
    }


def probe_cache() -> Facts:
    """The cache folder, its entries and bytes."""
    root = paths.cache_root()
    entries = size = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(OSError):  # another process may be clearing up
                size += (Path(folder) / name).lstat().st_size
        entries += {"module.so", "manifest.json"} <= set(files)
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    return {
        "path": str(root),
        "exists": root.is_dir(),
        "writable": os.access(nearest, os.W_OK | os.X_OK),
        "entries": entries,
        "bytes": size,
    }


def probe_environment() -> Facts:
    """The variables that are set: ours, and those that choose a compiler or headers."""
    ours = {variable.name: variable for variable in env.all_variables()}
    facts: Facts = {}
    for name in sorted(os.environ):
        if not name.startswith("SGL_MOE_JIT_") and name not in _FOREIGN_VARIABLES:
            continue
        note = ""
        if name in ours:
            try:
                ours[name].get()
            except ValueError as error:
                note = f"   <- ignored or refused: {error}"
        elif name not in _FOREIGN_VARIABLES:
            note = "   <- not a variable of this library"
        facts[name] = os.environ[name] + note
    return facts
