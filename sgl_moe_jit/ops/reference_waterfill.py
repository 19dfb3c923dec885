# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of the ops on top-k ids under expert parallelism: plain Python, token after token.

Written from the rules in the ops' docstrings, sharing no code with the kernels. Ids must be in
range, except negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = list[list[int]]


def _rows(topk_ids: Tensor, num_valid: int | None) -> Rows:
    """Return the rows' ids, those of padding all -1."""
    rows: Rows = topk_ids.tolist()
    last = len(rows) if num_valid is None else num_valid
    return [row if i < last else [-1] * len(row) for i, row in enumerate(rows)]


def count(
    topk_ids: Tensor, num_routed_experts: int, world_size: int, num_valid: int | None = None
) -> tuple[list[int], int]:
    """Return the (token, expert) pairs of each rank, and the rows with at least one."""
    local = num_routed_experts // world_size
    rows = _rows(topk_ids, num_valid)
    counts = [0] * world_size
    for row in rows:
        for expert in row:
            if expert >= 0:
                counts[expert // local] += 1
    return counts, sum(max(row, default=-1) >= 0 for row in rows)


def expand(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_routed_experts: int,
    world_size: int,
    ranks: int | Sequence[int],
    shared_weight: float = 1.0,
    num_shared: int = 1,
    num_valid: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ids and weights with shared columns on one rank, or on one rank for each row."""
    local = num_routed_experts // world_size
    rows = _rows(topk_ids, num_valid)
    weights = torch.zeros(len(rows), topk_ids.shape[1] + num_shared, dtype=topk_weights.dtype)
    ids: Rows = []
    for i, row in enumerate(rows):
        rank = ranks if isinstance(ranks, int) else ranks[i]
        sent = [e if e < 0 else e + e // local * num_shared for e in row]
        for k, expert in enumerate(row):
            if expert >= 0:
                weights[i, k] = topk_weights[i, k]
        if max(row, default=-1) >= 0:
            first = rank * (local + num_shared) + local
            sent += [first + s for s in range(num_shared)]
            weights[i, len(row) :] = shared_weight
        else:
            sent += [-1] * num_shared
        ids.append(sent)
    width = topk_ids.shape[1] + num_shared
    return torch.tensor(ids, dtype=topk_ids.dtype).reshape(len(rows), width), weights
