# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that only benchmarks need: the streaming one, an add-RMSNorm, and the peers'.

A peer's sources are never part of this project; a folder that holds them is named on the command
line: ``--peer sglang=DIR`` (``moe_finalize_fuse_shared.cu`` and ``tvm_ffi_utils.h`` of its kernel,
``deepep_waterfill_kernels.py`` of its Triton kernels for ``bench waterfill``)
and ``--peer flashinfer=DIR`` (its ``csrc`` and ``include``, or what
``python -m sgl_moe_jit.bench.carry`` copied of them).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sgl_moe_jit.jit import cache_once, load_jit, paths

# As flashinfer 0.7 builds its norm and fused-MoE modules.
FLASHINFER_FLAGS = (
    "-use_fast_math",
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
    *(
        f"-DFLASHINFER_ENABLE_{name}"
        for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")
    ),
    "-DENABLE_BF16",
    "-DENABLE_FP8",
    "-DENABLE_FP4",
    "-DTLLM_ENABLE_CUDA",
)
# Ours, each of which includes flashinfer's files.
FLASHINFER_SOURCES = ("bench/flashinfer_norm.cu", "bench/flashinfer_finalize.cu")
# Files of a peer's folder that tell it from another one; one of them is enough.
_SGLANG_WATERFILL = "deepep_waterfill_kernels.py"
_PROBES = {
    "sglang": ("moe_finalize_fuse_shared.cu", _SGLANG_WATERFILL),
    "flashinfer": ("include/flashinfer/norm.cuh",),
}


def parse_peers(texts: list[str]) -> dict[str, Path]:
    """Read ``NAME=DIR`` arguments.

    Raises:
        ValueError: another form or name.
        FileNotFoundError: the folder is not that peer's.
    """
    found = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if name not in _PROBES or not folder:
            known = " or ".join(f"{peer}=DIR" for peer in _PROBES)
            raise ValueError(f"--peer: expected {known}, got {text!r}")
        if not any((Path(folder) / probe).is_file() for probe in _PROBES[name]):
            expected = " or ".join(_PROBES[name])
            raise FileNotFoundError(f"--peer {name}: expected {expected} in {folder}")
        found[name] = Path(folder).resolve()
    return found


def peer_version(folder: Path) -> str:
    """Return what the folder's ``version.txt`` says, or ``unknown``."""
    path = folder / "version.txt"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def flashinfer_includes(folder: Path) -> list[Path]:
    """Return where flashinfer's files find what they include, apart from CUTLASS."""
    return [
        paths.csrc_dir() / "bench" / "stand_ins",
        folder,
        folder / "include",
        folder / "csrc" / "nv_internal" / "include",
    ]


@cache_once
def stream(top_k: int, /) -> Any:
    """Return ``stream(out, rows, shared, deep, threads, blocks)``; see csrc/bench/stream.cu."""
    define = f"-DSMJ_TOP_K={top_k}"
    return load_jit(
        "bench_stream",
        f"top{top_k}",
        cuda_files=["bench/stream.cu"],
        cpp_files=["bench/stream_binding.cc"],
        extra_cuda_cflags=[define],
        extra_cflags=[define],
    ).stream


@cache_once
def add_rmsnorm() -> Any:
    """Return our plain ``add_rmsnorm(x, residual, weight, eps)``, in place."""
    return load_jit(
        "bench_add_rmsnorm",
        cuda_files=["bench/add_rmsnorm.cu"],
        cpp_files=["bench/add_rmsnorm_binding.cc"],
    ).add_rmsnorm


@cache_once
def flashinfer_add_rmsnorm(folder: str, /) -> Any:
    """Return flashinfer's ``add_rmsnorm(x, residual, weight, eps)``, in place."""
    return load_jit(
        "peer_flashinfer_norm",
        cuda_files=["bench/flashinfer_norm.cu"],
        cpp_files=["bench/add_rmsnorm_binding.cc"],
        extra_include_paths=flashinfer_includes(Path(folder)),
        extra_cuda_cflags=FLASHINFER_FLAGS,
    ).add_rmsnorm


@cache_once
def flashinfer_finalize(folder: str, /) -> Any:
    """Return flashinfer's ``finalize(out, gemm2_out, row_of, expert_weights)``."""
    return load_jit(
        "peer_flashinfer_finalize",
        cuda_files=["bench/flashinfer_finalize.cu"],
        cpp_files=["bench/flashinfer_finalize_binding.cc"],
        extra_include_paths=flashinfer_includes(Path(folder)),
        extra_cuda_cflags=FLASHINFER_FLAGS,
        extra_dependencies=["cutlass"],
    ).finalize


@cache_once
def sglang_finalize(folder: str, /) -> Any:
    """Return sglang's ``(out, gemm2_out, idx, weights, shared, top_k, enable_pdl)``."""
    return load_jit(
        "peer_sglang",
        cuda_files=[Path(folder) / "moe_finalize_fuse_shared.cu"],
        extra_include_paths=[Path(folder)],
        extra_dependencies=["cutlass"],
    ).moe_finalize_fuse_shared


@cache_once
def sglang_waterfill(folder: str, /) -> Any:
    """Return sglang's module of Triton kernels that count and expand; it needs torch and triton."""
    path = Path(folder) / _SGLANG_WATERFILL
    if not path.is_file():
        raise FileNotFoundError(f"--peer sglang: expected {_SGLANG_WATERFILL} in {folder}")
    spec = importlib.util.spec_from_file_location("peer_sglang_waterfill", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
