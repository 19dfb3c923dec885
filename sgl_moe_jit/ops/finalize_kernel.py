# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind ``moe_finalize_fuse_shared``: which exist, and which serves a call."""

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
from sgl_moe_jit.ops.finalize_arguments import num_tokens_of, output_width
from sgl_moe_jit.ops.library import cpu_settings

OP = "moe_finalize_fuse_shared"

# Of weights; None: all are 1.
WEIGHT_TYPES: dict[torch.dtype | None, tuple[str, str]] = dict(CPP_TYPES.items())
WEIGHT_TYPES[None] = ("UnitWeight", "kNone")
# Slots known at compile time for the public models' top_k; any other count runs the generic loop.
UNROLLED_TOP_K = (1, 2, 4, 6, 8, 10, 16)


def cuda_spec(
    activation: torch.dtype,
    weight: torch.dtype | None,
    top_k: int,
    arch: CudaArch,
    gate: bool = False,
) -> BuildSpec:
    """Return the CUDA module of these options.

    Args:
        activation: Of rows, shared and output.
        weight: Of the expert weights; None when all are 1.
        top_k: Slots a token; 0 is the module for any count.
        arch: CUDA target.
        gate: Whether the shared row has a gate.
    """
    act_type, act_member = CPP_TYPES[activation]
    weight_type, weight_member = WEIGHT_TYPES[weight]
    both = [f"-DSMJ_TOP_K={top_k}", f"-DSMJ_GATE={int(gate)}"]
    words = ("finalize", act_member[1:], weight_member[1:], f"top{top_k or 'any'}")
    return make_spec(
        (*words, "gate") if gate else words,
        cuda_files=["moe/finalize.cu"],
        cpp_files=["moe/finalize_binding.cc"],
        extra_cuda_cflags=[f"-DSMJ_ACTIVATION={act_type}", f"-DSMJ_WEIGHT={weight_type}", *both],
        extra_cflags=[
            f"-DSMJ_ACTIVATION_DTYPE={act_member}",
            f"-DSMJ_WEIGHT_DTYPE={weight_member}",
            *both,
        ],
        arch=arch,
    )


def _cpu_spec() -> BuildSpec:
    return make_spec(
        ("finalize", "cpu"), cpp_files=["moe/finalize_cpu.cc", "moe/finalize_cpu_binding.cc"]
    )


def _all_cuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    for activation in CPP_TYPES:
        for weight in WEIGHT_TYPES:
            for gate in (False, True):
                for top_k in (0, *UNROLLED_TOP_K):
                    yield cuda_spec(activation, weight, top_k, arch, gate)


register_family(KernelFamily(OP, _all_cuda_specs, lambda: iter([_cpu_spec()])))


class Kernel(NamedTuple):
    """A loaded module's exports.

    Attributes:
        write: The call, into a given output. One for CUDA returns False, without doing anything,
            when another module is the right one.
        check: What a call without one has to pass before there is a new output.
        quick: Address of both for the extension of ``ops/quick_call.py``.
    """

    write: Any
    check: Any
    quick: int


@cache_once
def _cpu_kernel() -> Kernel:
    with quick_call.loading():
        module = load_spec(_cpu_spec())
    return Kernel(module.moe_finalize, module.check, module.quick_address())


@cache_once
def cuda_kernel(
    activation: torch.dtype,
    weight: torch.dtype | None,
    top_k: int,
    gate: bool,
    device_index: int,
    /,
) -> Kernel:
    """Return the module of these options, ready for a device; ``top_k`` 0 takes any count."""
    arch = current_arch(device_index)
    with quick_call.loading():
        module = load_spec(cuda_spec(activation, weight, top_k, arch, gate))
    module.serve_device(device_index, arch.supports_pdl)
    return Kernel(module.moe_finalize, module.check, module.quick_address())


# By top_k, the module that served the last call without and with a gate: the quick way's guess.
LAST_KERNEL: dict[int, Kernel] = {}
LAST_GATED_KERNEL: dict[int, Kernel] = {}
# The one for a CPU, which serves every dtype, with and without a gate, by the top_k it has served.
LAST_CPU_KERNEL: dict[int, Kernel] = {}


def _find(gemm2_out: Tensor, expert_weights: Tensor | None, top_k: int, gate: bool) -> Kernel:
    check_dtypes(gemm2_out, expert_weights)
    device = gemm2_out.device
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(f"gemm2_out: expected a CPU or NVIDIA CUDA tensor, got device {device}")
    unrolled = top_k if top_k in UNROLLED_TOP_K else 0
    weight = None if expert_weights is None else expert_weights.dtype
    kernel = cuda_kernel(gemm2_out.dtype, weight, unrolled, gate, device.index)
    (LAST_GATED_KERNEL if gate else LAST_KERNEL)[top_k] = kernel
    return kernel


def check_dtypes(gemm2_out: Tensor, expert_weights: Tensor | None) -> None:
    """Refuse dtypes no module is built for; everything else is checked in C++."""
    for name, x in (("gemm2_out", gemm2_out), ("expert_weights", expert_weights)):
        if x is not None and x.dtype not in CPP_TYPES:
            raise TypeError(
                f"{name}: expected bfloat16, float16 or float32, got "
                f"{str(x.dtype).removeprefix('torch.')}; convert it with .to()"
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


def run(
    out: Tensor | None,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    shared_gate_logits: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    hidden_dim: int | None,
) -> Tensor:
    """Pick the module for dtypes, top_k, gate and device, call it, and return what it wrote.

    ``out`` None: a new tensor, as wide as ``hidden_dim`` says; the rest as in the public op.
    """
    inputs = (
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        top_k,
        routed_scaling_factor,
    )
    on_cpu = gemm2_out.device.type == "cpu"
    if on_cpu:
        check_dtypes(gemm2_out, expert_weights)
        kernel = _cpu_kernel()
    else:
        kernel = _find(gemm2_out, expert_weights, top_k, shared_gate_logits is not None)
        flags = env.launch_flags()
        if flags & env.FLAG_CHECK_INDICES:
            check_indices(expanded_idx_to_permuted_idx, gemm2_out.shape[0])
        if enable_pdl is False:
            flags &= ~env.FLAG_PDL
    if out is None:
        kernel.check(*inputs, hidden_dim)
        out = new_output(*inputs[:4], top_k, hidden_dim)
    if on_cpu:
        kernel.write(out, *inputs, *cpu_settings())
        LAST_CPU_KERNEL[top_k] = kernel
    else:
        served = kernel.write(out, *inputs, flags)
        assert served, "the module was picked for this call"
    return out


def new_output(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    hidden_dim: int | None,
) -> Tensor:
    """Return an empty output for a call.

    Of torch's own making: one that a module allocates and returns comes through DLPack, and on such
    memory ``record_stream`` does nothing.
    """
    num_tokens = num_tokens_of(expanded_idx_to_permuted_idx, expert_weights, top_k)
    width = output_width(gemm2_out, shared_output, hidden_dim)
    return torch.empty((num_tokens, width), dtype=gemm2_out.dtype, device=gemm2_out.device)
