# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared``: weighted un-permute and shared-expert add in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import (
    check_devices,
    check_kinds,
    num_tokens_of,
    output_width,
)
from sgl_moe_jit.ops.finalize_backward import backward
from sgl_moe_jit.ops.finalize_kernel import OP, check_dtypes, launch
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    check_writable,
    from_dispatcher,
    library,
    mark_written,
    refuse_forward_ad,
)


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
    width = output_width(gemm2_out, shared_output, hidden_dim)
    out = gemm2_out.new_empty((num_tokens_of(expert_weights), width))
    launch(
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
    check_dtypes(gemm2_out, expert_weights)
    check_devices(gemm2_out, expanded_idx_to_permuted_idx, expert_weights, shared_output)
    width = output_width(gemm2_out, shared_output, hidden_dim)
    return gemm2_out.new_empty((num_tokens_of(expert_weights), width))


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
    check_writable(out)
    launch(
        out,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        enable_pdl,
        routed_scaling_factor,
    )
    mark_written(out)


def _fake_out(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    out: Tensor,
) -> None:
    check_dtypes(gemm2_out, expert_weights)
    # With one tensor on "meta" this runs in place of a kernel: nothing real may be left unwritten.
    check_devices(gemm2_out, expanded_idx_to_permuted_idx, expert_weights, shared_output, out)


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
    f"{OP}({_ARGS}bool? enable_pdl=None, float routed_scaling_factor=1.0, "
    "int? hidden_dim=None) -> Tensor"
)
library.define(
    f"{OP}_out({_ARGS}bool? enable_pdl, float routed_scaling_factor, Tensor(a!) out) -> ()"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
    library.impl(f"{OP}_out", from_dispatcher(OP, _out_variant), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_fake(f"{NAMESPACE}::{OP}_out", _fake_out, lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
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
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes disagree, ``top_k`` is out of range, strides or devices do not fit,
            memory overlaps; or ``out`` is ``shared_output`` under tracing.
        RuntimeError: ``out`` with gradients enabled and an input that requires one, or ``out`` is
            an inference tensor outside inference mode.
        NotImplementedError: an input has a forward-mode tangent.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``gemm2_out``, ``expert_weights`` and ``shared_output`` (plain torch
    backward), not through ``out=``.

    Cost: ``A * H * (K + 2) + K * (4 + W)`` bytes and ``H * (2K + 1)`` flops a token, A and W the
    item sizes of activations and weights.
    Source: include/sgl_moe_jit/moe/finalize.cuh, csrc/moe/finalize_cpu.cc.
    Reference: sgl_moe_jit.ops.reference.moe_finalize_fuse_shared.
    """
    tensors = (gemm2_out, expanded_idx_to_permuted_idx, expert_weights, shared_output)
    check_kinds(*tensors, top_k, enable_pdl, routed_scaling_factor, hidden_dim)
    refuse_forward_ad(OP, *tensors)
    direct = can_bypass_dispatcher(*tensors, out)
    if out is None:
        function = _functional if direct else torch.ops.sgl_moe_jit.moe_finalize_fuse_shared
        result: Tensor = function(*tensors, top_k, enable_pdl, routed_scaling_factor, hidden_dim)
        return result
    width = output_width(gemm2_out, shared_output, hidden_dim)
    if out.dim() == 2 and out.shape[1] != width:  # C++ sees only out's width, and takes it for H
        raise ValueError(f"out: expected width {width}, got {out.shape[1]}")
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError("out: expected a plain tensor, got a negated view; pass another tensor")
    if direct:
        _out_variant(*tensors, top_k, enable_pdl, routed_scaling_factor, out)
        return out
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced and out is shared_output:
        raise ValueError("out: may not be shared_output while tracing; pass another tensor")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, out)):
        raise RuntimeError(
            f"{OP}: out= does not support gradients, and an input requires one; call it without "
            "out=, or under torch.no_grad()"
        )
    torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out(
        *tensors, top_k, enable_pdl, routed_scaling_factor, out
    )
    return out
