# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared`` as torch ops: schemas, kernels, fake implementation, gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import check_devices, num_tokens_of, output_width
from sgl_moe_jit.ops.finalize_backward import (
    gate_backward,
    rows_backward,
    weights_backward,
)
from sgl_moe_jit.ops.finalize_kernel import OP, check_dtypes, run
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    check_writable,
    from_dispatcher,
    library,
    mark_written,
)


def _functional(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
    shared_gate_logits: Tensor | None = None,
) -> Tensor:
    return run(
        None,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        top_k,
        enable_pdl,
        routed_scaling_factor,
        hidden_dim,
    )


def _fake(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
    shared_gate_logits: Tensor | None = None,
) -> Tensor:
    check_dtypes(gemm2_out, expert_weights)
    check_devices(
        gemm2_out,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_weights=expert_weights,
        shared_output=shared_output,
        shared_gate_logits=shared_gate_logits,
    )
    width = output_width(gemm2_out, shared_output, hidden_dim)
    rows = num_tokens_of(expanded_idx_to_permuted_idx, expert_weights, top_k)
    return gemm2_out.new_empty((rows, width))


def _out_variant(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    shared_gate_logits: Tensor | None,
    out: Tensor,
) -> None:
    check_writable(out)
    run(
        out,
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        top_k,
        enable_pdl,
        routed_scaling_factor,
        None,
    )
    mark_written(out)


def _fake_out(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    shared_gate_logits: Tensor | None,
    out: Tensor,
) -> None:
    check_dtypes(gemm2_out, expert_weights)
    # With one tensor on "meta" this runs in place of a kernel: nothing real may be left unwritten.
    check_devices(
        gemm2_out,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        expert_weights=expert_weights,
        shared_output=shared_output,
        shared_gate_logits=shared_gate_logits,
        out=out,
    )


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    gemm2_out, idx, weights, shared_output, top_k, _, factor, _, gate = inputs
    # What only one gradient reads is kept for that one: the rows are the largest tensor of a layer.
    rows = gemm2_out if ctx.needs_input_grad[2] else None
    shared = shared_output if gate is not None and ctx.needs_input_grad[8] else None
    ctx.save_for_backward(rows, idx, weights, shared, gate)
    ctx.rows_shape, ctx.dtype = tuple(gemm2_out.shape), gemm2_out.dtype
    ctx.top_k, ctx.factor = top_k, factor
    ctx.has_shared = shared_output is not None


def _autograd(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    gemm2_out, idx, weights, shared_output, gate = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_gemm2 = grad_weights = None
    if needs[0]:
        grad_gemm2 = rows_backward(
            grad_out, idx, weights, ctx.top_k, ctx.factor, ctx.rows_shape, ctx.dtype
        )
    if needs[2]:
        grad_weights = weights_backward(
            grad_out, gemm2_out, idx, ctx.top_k, ctx.factor, weights.dtype
        )
    grad_shared = grad_out if ctx.has_shared and needs[3] else None
    grad_gate = None
    if gate is not None:
        grad_shared, grad_gate = gate_backward(grad_out, shared_output, gate, (needs[3], needs[8]))
    return grad_gemm2, None, grad_weights, grad_shared, None, None, None, None, grad_gate


_ARGS = (
    "Tensor gemm2_out, Tensor expanded_idx_to_permuted_idx, Tensor? expert_weights, "
    "Tensor? shared_output, int top_k, "
)
library.define(
    f"{OP}({_ARGS}bool? enable_pdl=None, float routed_scaling_factor=1.0, "
    "int? hidden_dim=None, Tensor? shared_gate_logits=None) -> Tensor"
)
library.define(
    f"{OP}_out({_ARGS}bool? enable_pdl, float routed_scaling_factor, "
    "Tensor? shared_gate_logits, Tensor(a!) out) -> ()"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
    library.impl(f"{OP}_out", from_dispatcher(OP, _out_variant), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_fake(f"{NAMESPACE}::{OP}_out", _fake_out, lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
)
