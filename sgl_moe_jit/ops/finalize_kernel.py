# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind ``moe_finalize_fuse_shared``: which exist, and which serves a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import (
    BuildSpec,
    CudaArch,
    KernelFamily,
    cache_once,
    current_arch,
    load_spec,
    make_spec,
    register_family,
)
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.library import cpu_isa

OP = "moe_finalize_fuse_shared"

# (C++ type, member of host::DType)
_CPP = {torch.bfloat16: ("__nv_bfloat16", "kBFloat16"), torch.float32: ("float", "kFloat32")}
# Slots known at compile time for the public models' top_k; any other count runs the generic loop.
_UNROLLED_TOP_K = (1, 2, 4, 6, 8, 10, 16)


def cuda_spec(
    activation: torch.dtype, weight: torch.dtype, top_k: int, arch: CudaArch
) -> BuildSpec:
    """Return the CUDA module of these dtypes; ``top_k`` 0 is the one for any count."""
    defines = [
        f"-DSMJ_ACTIVATION={_CPP[activation][0]}",
        f"-DSMJ_WEIGHT={_CPP[weight][0]}",
        f"-DSMJ_TOP_K={top_k}",
    ]
    return make_spec(
        ("finalize", _CPP[activation][1][1:], _CPP[weight][1][1:], f"top{top_k or 'any'}"),
        cuda_files=["moe/finalize.cu"],
        cpp_files=["moe/finalize_binding.cc"],
        extra_cuda_cflags=defines,
        extra_cflags=[
            f"-DSMJ_ACTIVATION_DTYPE={_CPP[activation][1]}",
            f"-DSMJ_WEIGHT_DTYPE={_CPP[weight][1]}",
            f"-DSMJ_TOP_K={top_k}",
        ],
        arch=arch,
    )


def _cpu_spec() -> BuildSpec:
    return make_spec(
        ("finalize", "cpu"), cpp_files=["moe/finalize_cpu.cc", "moe/finalize_cpu_binding.cc"]
    )


def _allcuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    for activation in _CPP:
        for weight in _CPP:
            for top_k in (0, *_UNROLLED_TOP_K):
                yield cuda_spec(activation, weight, top_k, arch)


register_family(KernelFamily(OP, _allcuda_specs, lambda: iter([_cpu_spec()])))


@cache_once
def _cpu_kernel() -> Any:
    return load_spec(_cpu_spec()).moe_finalize


@cache_once
def _cuda_kernel(
    activation: torch.dtype, weight: torch.dtype, top_k: int, device_index: int, /
) -> Any:
    arch = current_arch(device_index)
    module = load_spec(cuda_spec(activation, weight, top_k, arch))
    return module.moe_finalize, arch.supports_pdl


def check_dtypes(gemm2_out: Tensor, expert_weights: Tensor) -> None:
    """Refuse dtypes no module is built for; everything else is checked in C++."""
    for name, x in (("gemm2_out", gemm2_out), ("expert_weights", expert_weights)):
        if x.dtype not in _CPP:
            raise TypeError(
                f"{name}: expected bfloat16 or float32, got {str(x.dtype).removeprefix('torch.')}; "
                "convert it with .to()"
            )


def check_indices(expanded_idx_to_permuted_idx: Tensor, num_rows: int) -> None:
    """Raise ValueError when an index is at or beyond ``num_rows``. Synchronises on CUDA."""
    if expanded_idx_to_permuted_idx.numel() == 0:
        return
    largest = int(expanded_idx_to_permuted_idx.max())
    if largest >= num_rows:
        where = int(expanded_idx_to_permuted_idx.reshape(-1).argmax())
        raise ValueError(
            f"expanded_idx_to_permuted_idx: expected indices below {num_rows} (the rows of "
            f"gemm2_out), got {largest} at flat position {where}"
        )


def launch(
    out: Tensor,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
) -> None:
    """Write ``out``: pick the module for dtypes, top_k and device, and call it."""
    check_dtypes(gemm2_out, expert_weights)
    device = gemm2_out.device
    if device.type == "cpu":
        _cpu_kernel()(
            out,
            gemm2_out,
            expanded_idx_to_permuted_idx,
            expert_weights,
            shared_output,
            top_k,
            routed_scaling_factor,
            cpu_isa(),
            *cpu_workers(),
        )
        return
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(f"gemm2_out: expected a CPU or NVIDIA CUDA tensor, got device {device}")
    if env.CHECK_INDICES.get():
        check_indices(expanded_idx_to_permuted_idx, gemm2_out.shape[0])
    unrolled = top_k if top_k in _UNROLLED_TOP_K else 0
    kernel, pdl_supported = _cuda_kernel(
        gemm2_out.dtype, expert_weights.dtype, unrolled, device.index
    )
    use_pdl = pdl_supported and enable_pdl is not False and env.PDL.get()
    kernel(
        out,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        routed_scaling_factor,
        use_pdl,
        env.VECTOR.get(),
    )
