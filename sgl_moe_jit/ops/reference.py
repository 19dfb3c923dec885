# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles: each op in float64, written for clarity; they share no code with the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative error of rounding to nearest, and half of the smallest subnormal.
_ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
}


def moe_finalize_fuse_shared(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    hidden_dim: int | None = None,
) -> Tensor:
    """Return ``gate * shared + routed_scaling_factor * sum_k w[t, k] * gemm2_out[idx[t, k]]``.

    In float64. Slots with a negative index count as absent, whatever their weight holds.
    Differentiable.

    Args:
        gemm2_out: [P, H_pad], any floating dtype.
        expanded_idx_to_permuted_idx: [T, K] or [T * K], any integer dtype.
        expert_weights: [T, K], any floating dtype; None: all 1.
        shared_output: [T, H], or None.
        top_k: K.
        routed_scaling_factor: Multiplies the routed sum.
        shared_gate_logits: [T] or [T, 1], any floating dtype; ``gate`` is their sigmoid. None: 1.
        hidden_dim: H when there is no shared output; None means H_pad.

    Returns:
        [T, H] float64.
    """
    idx = expanded_idx_to_permuted_idx.reshape(-1, top_k).long()
    width = (
        shared_output.shape[1] if shared_output is not None else hidden_dim or gemm2_out.shape[1]
    )
    rows = gemm2_out[:, :width].double()
    weights = rows.new_ones(idx.shape) if expert_weights is None else expert_weights.double()
    total = rows.new_zeros(idx.shape[0], width)
    for k in range(top_k):
        present = (idx[:, k] >= 0).nonzero().squeeze(1)
        term = weights[present, k, None] * rows[idx[present, k]]
        total = total.index_add(0, present, term)
    total = total * routed_scaling_factor
    if shared_output is None:
        return total
    shared = shared_output.double()
    if shared_gate_logits is not None:
        shared = shared_gate_logits.double().reshape(-1, 1).sigmoid() * shared
    return total + shared


def finalize_tolerance(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    hidden_dim: int | None = None,
) -> Tensor:
    """Return, per element, the largest error a correct kernel can have: [T, H] float64.

    The output's own rounding (2^-8 relative for bfloat16, 2^-11 for float16, 2^-24 for float32;
    half of the smallest subnormal near zero) plus one float32 rounding a term, on the sum of the
    terms' magnitudes. A gate's value is off by six float32 roundings (an exponential good to two
    units in the last place, a sum, a quotient) and, where its exponential is subnormal, 2^-148.
    """

    def oracle(
        rows: Tensor, weights: Tensor | None, shared: Tensor | None, factor: float
    ) -> Tensor:
        return moe_finalize_fuse_shared(
            rows,
            expanded_idx_to_permuted_idx,
            weights,
            shared,
            top_k,
            routed_scaling_factor=factor,
            shared_gate_logits=shared_gate_logits,
            hidden_dim=hidden_dim,
        )

    weights = expert_weights
    absolute = oracle(
        gemm2_out.abs(),
        None if weights is None else weights.abs(),
        None if shared_output is None else shared_output.abs(),
        abs(routed_scaling_factor),
    )
    value = oracle(gemm2_out, weights, shared_output, routed_scaling_factor)
    before = (top_k + 2) * 2.0**-24 * absolute
    if shared_output is not None and shared_gate_logits is not None:
        gate = shared_gate_logits.double().reshape(-1, 1).sigmoid()
        before = before + (6 * 2.0**-24 * gate + 2.0**-148) * shared_output.double().abs()
    relative, smallest = _ROUNDING[gemm2_out.dtype]
    return value.abs() * relative + smallest + before * (1 + 2.0**-8)
