# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared``: weighted un-permute and shared-expert add in one pass."""

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
from sgl_moe_jit.ops.library import NAMESPACE, can_bypass_dispatcher, library

_OP = "moe_finalize_fuse_shared"

# (C++ type, member of host::DType)
_CPP = {torch.bfloat16: ("__nv_bfloat16", "kBFloat16"), torch.float32: ("float", "kFloat32")}
# Slots known at compile time for the public models' top_k; any other count runs the generic loop.
_UNROLLED_TOP_K = (1, 2, 4, 6, 8, 10, 16)
_CPU_ISA = {"auto": -1, "portable": 0, "avx2": 1, "avx512": 2}


def _cuda_spec(
    activation: torch.dtype, weight: torch.dtype, top_k: int, arch: CudaArch
) -> BuildSpec:
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


def _all_cuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    for activation in _CPP:
        for weight in _CPP:
            for top_k in (0, *_UNROLLED_TOP_K):
                yield _cuda_spec(activation, weight, top_k, arch)


register_family(KernelFamily(_OP, _all_cuda_specs, lambda: iter([_cpu_spec()])))


@cache_once
def _cpu_kernel() -> Any:
    return load_spec(_cpu_spec()).moe_finalize


@cache_once
def _cuda_kernel(
    activation: torch.dtype, weight: torch.dtype, top_k: int, device_index: int, /
) -> Any:
    arch = current_arch(device_index)
    module = load_spec(_cuda_spec(activation, weight, top_k, arch))
    return module.moe_finalize, arch.supports_pdl


def _check_dtypes(gemm2_out: Tensor, expert_weights: Tensor) -> None:
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
            f"expanded_idx_to_permuted_idx: expected indices below {num_rows} (the rows of gemm2_out), "
            f"got {largest} at flat position {where}"
        )


def _launch(
    out: Tensor,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
) -> None:
    _check_dtypes(gemm2_out, expert_weights)
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
            _CPU_ISA[env.CPU_ISA.get()],
            torch.get_num_threads(),
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


def _output_width(gemm2_out: Tensor, shared_output: Tensor | None, hidden_dim: int | None) -> int:
    if shared_output is None:
        return gemm2_out.shape[-1] if hidden_dim is None else hidden_dim
    width = shared_output.shape[-1]
    if hidden_dim is not None and hidden_dim != width:
        raise ValueError(
            f"hidden_dim: expected {width}, the width of shared_output, got {hidden_dim}"
        )
    return width


def _functional(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
) -> Tensor:
    width = _output_width(gemm2_out, shared_output, hidden_dim)
    if width < 1:
        raise ValueError(f"hidden_dim: expected 1 to {gemm2_out.shape[-1]}, got {width}")
    out = gemm2_out.new_empty((expert_weights.shape[0], width))
    _launch(
        out,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        enable_pdl,
        routed_scaling_factor,
    )
    return out


def _fake(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
) -> Tensor:
    _check_dtypes(gemm2_out, expert_weights)
    width = _output_width(gemm2_out, shared_output, hidden_dim)
    return gemm2_out.new_empty((expert_weights.shape[0], width))


def _out_variant(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    out: Tensor,
) -> None:
    _launch(
        out,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        enable_pdl,
        routed_scaling_factor,
    )


def backward(
    grad_out: Tensor,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    top_k: int,
    routed_scaling_factor: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the routed sum in plain torch, for any floating dtype.

    Args:
        grad_out: [T, H].
        gemm2_out: [P, H_pad]; rows no slot refers to are not read.
        expanded_idx_to_permuted_idx: [T, K] or [T * K].
        expert_weights: [T, K].
        top_k: K.
        routed_scaling_factor: As in the forward pass.
        needs: Which of the two gradients to compute.

    Returns:
        Gradients of ``gemm2_out`` (zero in rows no slot refers to and in columns >= H) and of
        ``expert_weights`` (zero in absent slots); None where not needed.
    """
    num_tokens, width = grad_out.shape
    idx = expanded_idx_to_permuted_idx.reshape(num_tokens, top_k).long()
    present = idx >= 0
    rows = idx.clamp(min=0)
    # float32 sums for bfloat16 inputs, the inputs' own precision above that
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    scaled = grad_out.to(wide) * routed_scaling_factor
    grad_gemm2: Tensor | None = None
    grad_weights: Tensor | None = None
    if needs[0]:
        weights = torch.where(present, expert_weights, 0).to(wide)
        total = torch.zeros(gemm2_out.shape[0] + 1, width, dtype=wide, device=grad_out.device)
        target = torch.where(
            present, idx, gemm2_out.shape[0]
        )  # absent slots go to a row that is cut
        for k in range(top_k):  # one slot at a time: [T, K, H] in float32 would be gigabytes
            total = total.index_add(0, target[:, k], weights[:, k, None] * scaled)
        total = total[:-1]
        padding = gemm2_out.shape[1] - width
        grad_gemm2 = torch.nn.functional.pad(total, (0, padding)).to(gemm2_out.dtype)
    if needs[1]:
        columns = []
        for k in range(top_k):
            # An absent slot reads row 0 and is masked after; so is a row of NaN that no slot refers
            # to.
            row = gemm2_out[rows[:, k], :width] if gemm2_out.shape[0] else scaled
            column = (scaled * row.to(wide)).sum(1)
            columns.append(torch.where(present[:, k], column, 0))
        grad_weights = torch.stack(columns, 1).to(expert_weights.dtype)
    return grad_gemm2, grad_weights


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    gemm2_out, idx, weights, shared_output, top_k, _, factor, _ = inputs
    ctx.save_for_backward(gemm2_out, idx, weights)
    ctx.top_k, ctx.factor = top_k, factor
    ctx.has_shared = shared_output is not None


def _autograd(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    gemm2_out, idx, weights = ctx.saved_tensors
    needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[2])
    grad_gemm2, grad_weights = backward(
        grad_out, gemm2_out, idx, weights, ctx.top_k, ctx.factor, needs
    )
    grad_shared = grad_out if ctx.has_shared and ctx.needs_input_grad[3] else None
    return grad_gemm2, None, grad_weights, grad_shared, None, None, None, None


_ARGS = (
    "Tensor gemm2_out, Tensor expanded_idx_to_permuted_idx, Tensor expert_weights, "
    "Tensor? shared_output, int top_k, "
)
library.define(
    f"{_OP}({_ARGS}bool? enable_pdl=None, float routed_scaling_factor=1.0, int? hidden_dim=None) -> Tensor"
)
library.define(
    f"{_OP}_out({_ARGS}bool? enable_pdl, float routed_scaling_factor, Tensor(a!) out) -> ()"
)
for _key in ("CPU", "CUDA"):
    library.impl(_OP, _functional, _key)
    library.impl(f"{_OP}_out", _out_variant, _key)
torch.library.register_fake(f"{NAMESPACE}::{_OP}", _fake, lib=library)
torch.library.register_fake(f"{NAMESPACE}::{_OP}_out", lambda *args: None, lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{_OP}", _autograd, setup_context=_setup_context, lib=library
)


def moe_finalize_fuse_shared(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    *,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's expert rows, plus the shared expert's output, in one pass.

    ``out[t] = shared_output[t] + routed_scaling_factor * sum_k expert_weights[t, k] *
    gemm2_out[idx[t, k]]``. A slot with a negative index is skipped: no load, and its weight, NaN
    included, is ignored. A zero weight does not skip: 0 times NaN is NaN.

    T tokens, K experts a token, P permuted rows, H hidden size, H_pad >= H.

    Args:
        gemm2_out: [P, H_pad] bfloat16 or float32, adjacent columns, any row stride. The second
            GEMM's output, rows grouped by expert. Rows no slot refers to and columns >= H are never
            read.
        expanded_idx_to_permuted_idx: [T, K] or [T * K] int32, contiguous. Row of ``gemm2_out``;
            negative where there is none. At or above P: ValueError on CPU; on CUDA with
            ``SGL_MOE_JIT_CHECK_INDICES=1``, otherwise undefined.
        expert_weights: [T, K] float32 or bfloat16, contiguous.
        shared_output: [T, H] like ``gemm2_out``, adjacent columns, any row stride (0 too), or None.
            Never scaled. Under expert parallelism pass it on one rank a token, or the all-reduce
            adds it once a rank.
        top_k: K, 1 to 64.
        enable_pdl: Programmatic dependent launch. None: where the architecture has it (9.0 and up)
            and ``SGL_MOE_JIT_PDL`` is not off. Same bits.
        routed_scaling_factor: Multiplies the routed sum in float32, before the shared row is added.
        hidden_dim: H when there is no shared output; None means H_pad.
        out: [T, H] like ``gemm2_out`` to write into; allocated when None. May be exactly
            ``shared_output`` in eager mode; may not overlap any other input.

    Returns:
        [T, H], dtype of ``gemm2_out``. Accumulated in float32 by fused multiply-add in ascending k,
        rounded once: bitwise repeatable, equal on CUDA and CPU, and independent of the batch around
        the token. A token without rows gets its shared row bit for bit, or +0.

    Raises:
        TypeError: a dtype is not listed above.
        ValueError: shapes disagree, ``top_k`` is out of range, strides or devices do not fit,
            memory overlaps; or ``out`` is ``shared_output`` under tracing.
        RuntimeError: ``out`` with gradients enabled and an input that requires one.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``gemm2_out``, ``expert_weights`` and ``shared_output`` (plain torch
    backward), not through ``out=``.

    Cost: ``A * H * (K + 2) + K * (4 + W)`` bytes and ``H * (2K + 1)`` flops a token, A and W the
    item sizes of activations and weights.
    Source: include/sgl_moe_jit/moe/finalize.cuh, csrc/moe/finalize_cpu.cc.
    Reference: sgl_moe_jit.ops.reference.moe_finalize_fuse_shared.
    """
    tensors = (gemm2_out, expanded_idx_to_permuted_idx, expert_weights, shared_output)
    direct = can_bypass_dispatcher(*tensors, out)
    if out is None:
        function = _functional if direct else torch.ops.sgl_moe_jit.moe_finalize_fuse_shared
        result: Tensor = function(*tensors, top_k, enable_pdl, routed_scaling_factor, hidden_dim)
        return result
    width = _output_width(gemm2_out, shared_output, hidden_dim)
    if out.shape[-1] != width:
        raise ValueError(f"out: expected width {width}, got {out.shape[-1]}")
    if direct:
        _out_variant(*tensors, top_k, enable_pdl, routed_scaling_factor, out)
        return out
    if torch.compiler.is_compiling() and out is shared_output:
        raise ValueError("out: may not be shared_output under torch.compile; pass another tensor")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, out)):
        raise RuntimeError(
            f"{_OP}: out= does not support gradients, and an input requires one; call it without out=, "
            "or under torch.no_grad()"
        )
    torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out(
        *tensors, top_k, enable_pdl, routed_scaling_factor, out
    )
    return out
