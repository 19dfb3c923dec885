# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The finish in plain torch, for what the fused op does not take: other dtypes, other top_k."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.moe.topk import StandardTopKOutput


def weighted_sum(rows: Tensor, slot_of_row: Tensor, topk_output: StandardTopKOutput) -> Tensor:
    """Sum rows into tokens in ascending k, in float32 or wider, rounded once.

    Args:
        rows: [R, H], one for each present slot.
        slot_of_row: [R] flat slot (token * K + k) of each row.
        topk_output: The router's choice.
    """
    num_tokens, top_k = topk_output.topk_ids.shape
    wide = torch.promote_types(rows.dtype, torch.float32)
    order = slot_of_row.argsort()
    row_slot, rows = slot_of_row[order], rows[order]
    flat_weights = topk_output.topk_weights.reshape(-1).to(wide)
    total = torch.zeros(num_tokens, rows.shape[1], dtype=wide, device=rows.device)
    for k in range(top_k):
        here = (row_slot % top_k == k).nonzero().squeeze(1)
        term = flat_weights[row_slot[here], None] * rows[here].to(wide)
        total = total.index_add(0, row_slot[here] // top_k, term)
    if topk_output.routed_scaling_factor != 1.0:
        total = total * topk_output.routed_scaling_factor
    return total.to(rows.dtype)
