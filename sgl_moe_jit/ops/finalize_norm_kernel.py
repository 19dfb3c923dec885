# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind ``moe_finalize_fuse_shared_add_rmsnorm``: which exist, which serves a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
from sgl_moe_jit.ops import quick_call
from sgl_moe_jit.ops.cpp_types import CPP_TYPES
from sgl_moe_jit.ops.finalize_kernel import (
    UNROLLED_TOP_K,
    check_dtypes,
    check_indices,
)
from sgl_moe_jit.ops.library import cpu_settings

OP = "moe_finalize_fuse_shared_add_rmsnorm"
OP_FP8 = f"{OP}_fp8"
FP8 = torch.float8_e4m3fn


class NormInputs(NamedTuple):
    """What a call reads, in the order in which C++ takes it; as in the public op."""

    gemm2_out: Tensor
    expanded_idx_to_permuted_idx: Tensor
    expert_weights: Tensor | None
    shared_output: Tensor | None
    shared_gate_logits: Tensor | None
    residual: Tensor
    weight: Tensor


class NormOutputs(NamedTuple):
    """What a call writes, in the order in which C++ takes it.

    Attributes:
        out: [T, H] like ``residual``; float8_e4m3fn with a scale.
        residual_out: [T, H] like ``residual``.
        out_scale: [T, 1] float32, or None: no quantisation.
    """

    out: Tensor
    residual_out: Tensor
    out_scale: Tensor | None


def cuda_spec(activation: torch.dtype, top_k: int, fp8: bool, arch: CudaArch) -> BuildSpec:
    """Return the CUDA module of these options.

    Args:
        activation: Of rows, shared, residual and norm weight.
        top_k: Slots a token; 0 is the module for any count.
        fp8: Whether the output is float8_e4m3fn with a scale.
        arch: CUDA target.
    """
    act_type, act_member = CPP_TYPES[activation]
    both = [f"-DSMJ_TOP_K={top_k}", f"-DSMJ_FP8={int(fp8)}"]
    words = ("finalize_norm", act_member[1:], f"top{top_k or 'any'}")
    return make_spec(
        (*words, "fp8") if fp8 else words,
        cuda_files=["moe/finalize_norm.cu"],
        cpp_files=["moe/finalize_norm_binding.cc"],
        extra_cuda_cflags=[
            f"-DSMJ_ACTIVATION={act_type}",
            f"-DSMJ_CLUSTERS={int(arch.major >= 9)}",
            *both,
        ],
        extra_cflags=[
            f"-DSMJ_ACTIVATION_DTYPE={act_member}",
            *both,
        ],
        arch=arch,
    )


def _cpu_spec() -> BuildSpec:
    return make_spec(
        ("finalize_norm", "cpu"),
        cpp_files=["moe/finalize_norm_cpu.cc", "moe/finalize_norm_cpu_binding.cc"],
    )


def _all_cuda_specs(fp8: bool, arch: CudaArch) -> Iterator[BuildSpec]:
    for activation in CPP_TYPES:
        for top_k in (0, *UNROLLED_TOP_K):
            yield cuda_spec(activation, top_k, fp8, arch)


register_family(
    KernelFamily(OP, lambda arch: _all_cuda_specs(False, arch), lambda: iter([_cpu_spec()]))
)
register_family(
    KernelFamily(OP_FP8, lambda arch: _all_cuda_specs(True, arch), lambda: iter([_cpu_spec()]))
)


class NormKernel(NamedTuple):
    """A loaded module's export, and its address for the extension of ``ops/quick_call.py``."""

    write: Any
    quick: int


@cache_once
def _cpu_module() -> Any:
    with quick_call.loading():
        return load_spec(_cpu_spec())


@cache_once
def _cpu_kernel(fp8: bool, /) -> NormKernel:
    module = _cpu_module()
    return NormKernel(module.moe_finalize_norm, module.quick_address(fp8))


@cache_once
def _cuda_kernel(
    activation: torch.dtype, top_k: int, fp8: bool, device_index: int, /
) -> NormKernel:
    arch = current_arch(device_index)
    with quick_call.loading():
        module = load_spec(cuda_spec(activation, top_k, fp8, arch))
    module.serve_device(device_index, arch.supports_pdl)
    return NormKernel(module.moe_finalize_norm, module.quick_address())


# By whether there is a scale, and by top_k: the modules that served last, on a GPU and on a CPU.
LAST_CUDA: dict[bool, dict[int, NormKernel]] = {False: {}, True: {}}
LAST_CPU: dict[bool, dict[int, NormKernel]] = {False: {}, True: {}}


def check_inputs(inputs: NormInputs, top_k: int, eps: float, routed_scaling_factor: float) -> None:
    """Refuse wrong inputs before there are outputs; on CUDA the launch has the rest of it."""
    if inputs.gemm2_out.device.type == "cpu":
        check_dtypes(inputs.gemm2_out, inputs.expert_weights)
        _cpu_module().check(*inputs, top_k, routed_scaling_factor, eps)


def run(
    outputs: NormOutputs,
    inputs: NormInputs,
    top_k: int,
    eps: float,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
) -> None:
    """Write ``outputs``: pick the module for dtypes, top_k, output and device, and call it."""
    gemm2_out, idx, expert_weights = inputs[:3]
    check_dtypes(gemm2_out, expert_weights)
    device = gemm2_out.device
    tensors = (outputs.out, outputs.residual_out, outputs.out_scale, *inputs)
    numbers = (top_k, routed_scaling_factor, eps)
    fp8 = outputs.out_scale is not None
    if device.type == "cpu":
        kernel = _cpu_kernel(fp8)
        kernel.write(*tensors, *numbers, *cpu_settings())
        LAST_CPU[fp8][top_k] = kernel
        return
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(f"gemm2_out: expected a CPU or NVIDIA CUDA tensor, got device {device}")
    flags = env.launch_flags()
    if flags & env.FLAG_CHECK_INDICES:
        check_indices(idx, gemm2_out.shape[0])
    if enable_pdl is False:
        flags &= ~env.FLAG_PDL
    unrolled = top_k if top_k in UNROLLED_TOP_K else 0
    kernel = _cuda_kernel(gemm2_out.dtype, unrolled, fp8, device.index)
    kernel.write(*tensors, *numbers, flags)
    LAST_CUDA[fp8][top_k] = kernel
