# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of the ops around the two GEMMs; they share no code with the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows grouped by expert, each slot's row and each expert's end, one slot at a time.

    Args:
        hidden_states: [T, H], any dtype.
        topk_ids: [T, K], any integer dtype; outside [0, num_experts) means no expert.
        num_experts: E.
        alignment: What each expert's number of rows is made a multiple of, by rows of zeros.

    Returns:
        As the op, but with only the rows that exist: [R, H], [T, K] int32, [E] int32.
    """
    ids = topk_ids.reshape(-1).tolist()
    top_k = topk_ids.shape[1]
    row_of = [-1] * len(ids)
    rows: list[Tensor] = []
    ends: list[int] = []
    slots_of_expert: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(ids):
        if 0 <= expert < num_experts:
            slots_of_expert[expert].append(slot)
    for slots in slots_of_expert:
        for slot in slots:
            row_of[slot] = len(rows)
            rows.append(hidden_states[slot // top_k])
        while len(rows) % alignment != 0:
            rows.append(torch.zeros_like(hidden_states[0]))
        ends.append(len(rows))
    device = hidden_states.device
    return (
        torch.stack(rows) if rows else hidden_states[:0],
        torch.tensor(row_of, dtype=torch.int32, device=device).reshape(topk_ids.shape),
        torch.tensor(ends, dtype=torch.int32, device=device),
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(first half) * second half`` in float64. Differentiable.

    Args:
        x: [N, 2I], any floating dtype.

    Returns:
        [N, I] float64.
    """
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def silu_and_mul_tolerance(x: Tensor) -> Tensor:
    """Return, per element, the largest error a correct kernel can have: [N, I] float64.

    The output's own rounding (2^-8 relative for bfloat16, 2^-11 for float16, 2^-24 for float32;
    half of the smallest subnormal near zero), and before it four float32 roundings (product with
    the exponential, sum, quotient, product with up) and an exponential good to 2 units in the last
    place. Where an intermediate is subnormal its error is absolute, 2^-149, and grows with up.
    """
    value = silu_and_mul(x).abs()
    up = x.double().chunk(2, dim=-1)[1].abs()
    gate = x.double().chunk(2, dim=-1)[0].abs()
    before = (4 + 4) * 2.0**-24 * value + 2.0**-148 * (1 + gate) * (1 + up)
    rounding, subnormal = {
        torch.bfloat16: (2.0**-8, 2.0**-133),
        torch.float16: (2.0**-11, 2.0**-24),
        torch.float32: (2.0**-24, 2.0**-149),
    }[x.dtype]
    return before * (1 + rounding) + value * rounding + subnormal / 2
