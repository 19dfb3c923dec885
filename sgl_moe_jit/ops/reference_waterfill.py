# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of the ops on top-k ids under expert parallelism: plain Python, token after token.

Written from the rules in the ops' docstrings, sharing no code with the kernels. Ids must be in
range, except negative ones.
"""

from __future__ import annotations

import heapq
import itertools
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


def quotas(load: Sequence[int], tokens: int, remainder_start: int = 0) -> list[int]:
    """Pour tokens one by one onto the lowest rank; of equals, the first from remainder_start on."""
    world_size = len(load)
    heap = [(x, (r - remainder_start) % world_size, r) for r, x in enumerate(load)]
    heapq.heapify(heap)
    shares = [0] * world_size
    for _ in range(tokens):
        height, turn, rank = heap[0]
        heapq.heapreplace(heap, (height + 1, turn, rank))
        shares[rank] += 1
    return shares


def _evenly(num_left: int, num_all: int) -> list[bool]:
    """Return num_left times True among num_all, as evenly as whole numbers allow."""
    marks = [i * num_left // num_all for i in range(num_all + 1)]
    return [b > a for a, b in itertools.pairwise(marks)]


def spread(shares: Sequence[int]) -> list[int]:
    """Return each rank as often as its share says, mixed evenly at every halving of the ranks."""
    size = 1
    while size < len(shares):
        size *= 2

    def mix(first: int, size: int) -> list[int]:
        total = sum(shares[first : first + size])
        if size == 1 or total == 0:
            return [first] * total
        left, right = mix(first, size // 2), mix(first + size // 2, size // 2)
        picks = _evenly(len(left), total)
        sides = iter(left), iter(right)
        return [next(sides[0] if pick else sides[1]) for pick in picks]

    return mix(0, size)


def exact(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    *,
    global_counts: Sequence[int] | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    remainder_start: int = 0,
    num_valid: int | None = None,
) -> list[int]:
    """Return each row's rank by quotas that level the ranks; -1 for a row without a token."""
    counts, own = count(topk_ids, num_routed_experts, world_size, num_valid)
    load = counts if global_counts is None else global_counts
    tokens = [own * (r == source_rank) for r in range(world_size)]
    tokens = tokens if tokens_per_rank is None else list(tokens_per_rank)
    shares = quotas(load, sum(tokens), remainder_start)
    home = [min(a, b) for a, b in zip(tokens, shares, strict=True)]
    away = [a - b for a, b in zip(tokens, home, strict=True)]
    others = spread([a - b for a, b in zip(shares, home, strict=True)])
    mine = iter(others[sum(away[:source_rank]) :])
    stays = iter(_evenly(home[source_rank], own) if own else [])
    live = [max(row, default=-1) >= 0 for row in _rows(topk_ids, num_valid)]
    return [-1 if not x else source_rank if next(stays) else next(mine) for x in live]


_CHUNK = 256
_PARTS = 256


def restricted(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    *,
    global_counts: Sequence[int] | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    num_valid: int | None = None,
) -> list[int]:
    """Return each row's rank out of those it goes to anyway, chosen greedily 256 rows at a time.

    A chunk of n of all M tokens stands for all of them, so that in its eyes a token weighs M / n,
    or what is the same, a pair of the load n / M, in parts of 1/256. Rows with one rank come first.
    """
    local = num_routed_experts // world_size
    counts, own = count(topk_ids, num_routed_experts, world_size, num_valid)
    load = counts if global_counts is None else global_counts
    all_tokens = own if tokens_per_rank is None else sum(tokens_per_rank)
    rows = [{e // local for e in row if e >= 0} for row in _rows(topk_ids, num_valid)]
    ranks = [-1] * len(rows)
    for begin in range(0, len(rows), _CHUNK):
        chunk = [i for i in range(begin, min(begin + _CHUNK, len(rows))) if rows[i]]
        number = begin // _CHUNK
        turn = (source_rank + number) % world_size
        height = []
        for rank in range(world_size):
            pairs = (load[rank] - min(load)) * len(chunk) * _PARTS
            height.append(min(pairs // max(all_tokens, 1), 1 << 22))
            if len(chunk) != all_tokens:  # many chunks: not all of them round alike
                seed = rank * 0x9E3779B9 + (source_rank * 4096 + number) * 0x85EBCA6B
                height[rank] += seed % 2**32 >> 24
        for i in sorted(chunk, key=lambda i: len(rows[i]) > 1):
            ranks[i] = min(rows[i], key=lambda r: (height[r], (r - turn) % world_size))
            height[ranks[i]] += _PARTS
    return ranks


def sampled(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    *,
    global_counts: Sequence[int] | None = None,
    tokens_per_rank: Sequence[int] | None = None,
    num_valid: int | None = None,
) -> list[int]:
    """Return each row's rank by sglang 0.5.23's rule: a hash of the row, weighted by deficits."""
    local = num_routed_experts // world_size
    load, _ = count(topk_ids, num_routed_experts, world_size, num_valid)
    pairs = sum(load)
    if global_counts is not None and tokens_per_rank is not None:
        load = [a + b for a, b in zip(global_counts, tokens_per_rank, strict=True)]
        pairs = sum(global_counts)
    target = -(-(sum(load) + pairs // max(topk_ids.shape[1], 1)) // world_size)
    everywhere = global_counts is None or max(load) <= target
    weights = [max(target - x, 0) for x in load]
    weights = [w if r == source_rank else w * 10 // 11 for r, w in enumerate(weights)]
    ranks = []
    for t, row in enumerate(_rows(topk_ids, num_valid)):
        hits = [e // local for e in row if e >= 0]
        candidates = sorted({source_rank, *hits}) if not everywhere else list(range(world_size))
        total = sum(weights[r] for r in candidates)
        chosen = source_rank
        if not hits:
            chosen = -1
        elif total == 0:
            for r in hits if not everywhere else candidates:
                if load[r] * 11 < load[chosen] * 10:
                    chosen = r
        else:
            mixed = t ^ (source_rank * 0x9E3779B9 % 2**32)
            draw = (mixed * 1664525 + 1013904223) % 2**32 % total
            for r in candidates:
                if draw < weights[r]:
                    chosen = r
                    break
                draw -= weights[r]
        ranks.append(chosen)
    return ranks
