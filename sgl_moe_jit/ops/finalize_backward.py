# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of ``moe_finalize_fuse_shared`` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_backward(
    grad_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    top_k: int,
    routed_scaling_factor: float,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of ``gemm2_out``, which is linear in it: only its shape matters.

    Args:
        grad_out: [T, H].
        expanded_idx_to_permuted_idx: [T, K] or [T * K].
        expert_weights: [T, K]; None: all 1.
        top_k: K.
        routed_scaling_factor: As in the forward pass.
        shape: [P, H_pad], of ``gemm2_out``.
        dtype: Of ``gemm2_out``.

    Returns:
        [P, H_pad]; zero in rows no slot refers to and in columns >= H.
    """
    idx, present, scaled = _upstream(
        grad_out, expanded_idx_to_permuted_idx, top_k, routed_scaling_factor
    )
    ones = torch.ones((), dtype=scaled.dtype, device=grad_out.device)
    weights = torch.where(present, ones if expert_weights is None else expert_weights, 0)
    weights = weights.to(scaled.dtype)
    num_rows, width = shape[0], grad_out.shape[1]
    total = torch.zeros(num_rows + 1, width, dtype=scaled.dtype, device=grad_out.device)
    target = torch.where(present, idx, num_rows)  # absent slots go to a row that is cut
    for k in range(top_k):  # one slot at a time: [T, K, H] in float32 would be gigabytes
        total = total.index_add(0, target[:, k], weights[:, k, None] * scaled)
    return torch.nn.functional.pad(total[:-1], (0, shape[1] - width)).to(dtype)


def weights_backward(
    grad_out: Tensor,
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    top_k: int,
    routed_scaling_factor: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [T, K] of the expert weights, of their ``dtype``; zero in absent slots.

    Args as of :func:`rows_backward`; rows of ``gemm2_out`` that no slot refers to are not read.
    """
    idx, present, scaled = _upstream(
        grad_out, expanded_idx_to_permuted_idx, top_k, routed_scaling_factor
    )
    rows, width = idx.clamp(min=0), grad_out.shape[1]
    columns = []
    for k in range(top_k):
        # An absent slot reads row 0, which may hold anything: it is masked before the product,
        # so that the gradient of this gradient is clean too.
        row = gemm2_out[rows[:, k], :width] if gemm2_out.shape[0] else scaled
        row = torch.where(present[:, k, None], row, 0)
        columns.append((scaled * row.to(scaled.dtype)).sum(1))
    return torch.stack(columns, 1).to(dtype)


def _upstream(
    grad_out: Tensor, expanded_idx_to_permuted_idx: Tensor, top_k: int, routed_scaling_factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices [T, K], where they name a row, and the routed sum's gradient, wide."""
    idx = expanded_idx_to_permuted_idx.reshape(grad_out.shape[0], top_k).long()
    # float32 sums for bfloat16 inputs, the inputs' own precision above that
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    return idx, idx >= 0, grad_out.to(wide) * routed_scaling_factor


def gate_backward(
    grad_out: Tensor,
    shared_output: Tensor | None,
    shared_gate_logits: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``sigmoid(shared_gate_logits) * shared_output``, for any floating dtype.

    Args:
        grad_out: [T, H].
        shared_output: [T, H], of the dtype of ``grad_out``; None where the second is not needed.
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
        grad_shared = (grad_out.to(wide) * gate).to(grad_out.dtype)
    if needs[1]:
        assert shared_output is not None
        slope = (gate * (1 - gate)).reshape(-1)
        total = (grad_out.to(wide) * shared_output.to(wide)).sum(1) * slope
        grad_gate = total.reshape(shared_gate_logits.shape).to(shared_gate_logits.dtype)
    return grad_shared, grad_gate
