# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles: each op in float64, written for clarity; they share no code with the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_finalize_fuse_shared(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    *,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
) -> Tensor:
    """Return ``shared + routed_scaling_factor * sum_k w[t, k] * gemm2_out[idx[t, k]]`` in float64.

    Slots with a negative index count as absent, whatever their weight holds. Differentiable.

    Args:
        gemm2_out: [P, H_pad], any floating dtype.
        expanded_idx_to_permuted_idx: [T, K] or [T * K], any integer dtype.
        expert_weights: [T, K], any floating dtype.
        shared_output: [T, H], or None.
        top_k: K.
        routed_scaling_factor: Multiplies the routed sum.
        hidden_dim: H when there is no shared output; None means H_pad.

    Returns:
        [T, H] float64.
    """
    num_tokens = expert_weights.shape[0]
    width = (
        shared_output.shape[1] if shared_output is not None else hidden_dim or gemm2_out.shape[1]
    )
    idx = expanded_idx_to_permuted_idx.reshape(num_tokens, top_k).long()
    rows = gemm2_out[:, :width].double()
    weights = expert_weights.double()
    total = torch.zeros(num_tokens, width, dtype=torch.float64, device=gemm2_out.device)
    for k in range(top_k):
        present = (idx[:, k] >= 0).nonzero().squeeze(1)
        term = weights[present, k, None] * rows[idx[present, k]]
        total = total.index_add(0, present, term)
    total = total * routed_scaling_factor
    return total if shared_output is None else total + shared_output.double()


def finalize_tolerance(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor,
    shared_output: Tensor | None,
    top_k: int,
    *,
    routed_scaling_factor: float = 1.0,
    hidden_dim: int | None = None,
) -> Tensor:
    """Return, per element, the largest error a correct kernel can have: [T, H] float64.

    The output's own rounding (2^-8 relative for bfloat16, 2^-24 for float32; half of the smallest
    subnormal near zero) plus one float32 rounding a term, on the sum of the terms' magnitudes.
    """
    absolute = moe_finalize_fuse_shared(
        gemm2_out.abs(),
        expanded_idx_to_permuted_idx,
        expert_weights.abs(),
        None if shared_output is None else shared_output.abs(),
        top_k,
        routed_scaling_factor=abs(routed_scaling_factor),
        hidden_dim=hidden_dim,
    )
    value = moe_finalize_fuse_shared(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        routed_scaling_factor=routed_scaling_factor,
        hidden_dim=hidden_dim,
    )
    if gemm2_out.dtype == torch.bfloat16:
        output_rounding = value.abs() * 2.0**-8 + 2.0**-134
    else:
        output_rounding = value.abs() * 2.0**-24 + 2.0**-150
    return output_rounding + (top_k + 2) * 2.0**-24 * absolute * (1 + 2.0**-8)
