# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of ``moe_finalize_fuse_shared`` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def backward(
    grad_out: Tensor,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    top_k: int,
    routed_scaling_factor: float,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the routed sum in plain torch, for any floating dtype.

    Args:
        grad_out: [T, H].
        gemm2_out: [P, H_pad]; rows no slot refers to are not read.
        expanded_idx_to_permuted_idx: [T, K] or [T * K].
        expert_weights: [T, K]; None: all 1.
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
        ones = torch.ones((), dtype=wide, device=grad_out.device)
        weights = torch.where(present, ones if expert_weights is None else expert_weights, 0)
        weights = weights.to(wide)
        total = torch.zeros(gemm2_out.shape[0] + 1, width, dtype=wide, device=grad_out.device)
        target = torch.where(
            present, idx, gemm2_out.shape[0]
        )  # absent slots go to a row that is cut
        for k in range(top_k):  # one slot at a time: [T, K, H] in float32 would be gigabytes
            total = total.index_add(0, target[:, k], weights[:, k, None] * scaled)
        total = total[:-1]
        padding = gemm2_out.shape[1] - width
        grad_gemm2 = torch.nn.functional.pad(total, (0, padding)).to(gemm2_out.dtype)
    if needs[1] and expert_weights is not None:
        columns = []
        for k in range(top_k):
            # An absent slot reads row 0, which may hold anything: it is masked before the product,
            # so that the gradient of this gradient is clean too.
            row = gemm2_out[rows[:, k], :width] if gemm2_out.shape[0] else scaled
            row = torch.where(present[:, k, None], row, 0)
            columns.append((scaled * row.to(wide)).sum(1))
        grad_weights = torch.stack(columns, 1).to(expert_weights.dtype)
    return grad_gemm2, grad_weights


def gate_backward(
    grad_out: Tensor, shared_output: Tensor, shared_gate_logits: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``sigmoid(shared_gate_logits) * shared_output``, for any floating dtype.

    Args:
        grad_out: [T, H].
        shared_output: [T, H].
        shared_gate_logits: [T] or [T, 1].
        needs: Which of the two gradients to compute.

    Returns:
        Gradients of ``shared_output`` and ``shared_gate_logits``; None where not needed.
    """
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    gate = torch.sigmoid(shared_gate_logits.to(wide)).reshape(-1, 1)
    grad_shared: Tensor | None = None
    grad_gate: Tensor | None = None
    if needs[0]:
        grad_shared = (grad_out.to(wide) * gate).to(shared_output.dtype)
    if needs[1]:
        slope = (gate * (1 - gate)).reshape(-1)
        total = (grad_out.to(wide) * shared_output.to(wide)).sum(1) * slope
        grad_gate = total.reshape(shared_gate_logits.shape).to(shared_gate_logits.dtype)
    return grad_shared, grad_gate
