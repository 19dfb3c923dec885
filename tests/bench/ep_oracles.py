# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of the simulator's tests: scalar Python, one row and one rank at a time."""

from __future__ import annotations

import itertools


def add_rows_one_by_one(load: list[int], num_rows: int) -> int:
    """Return the maximum after giving each row to the least loaded rank."""
    load = list(load)
    for _ in range(num_rows):
        load[load.index(min(load))] += 1
    return max(load)


def sampled_ranks(hits, source, num_ranks, counts=None, tokens=None) -> list[int]:
    """Return the shared rank of each row by the sampled rule; counts and tokens: global."""
    own = [0] * num_ranks
    for row in hits:
        for rank in row:
            if rank >= 0:
                own[rank] += 1
    is_global = counts is not None
    pairs = sum(counts if is_global else own)
    load = [c + t for c, t in zip(counts, tokens, strict=True)] if is_global else own
    target = (sum(load) + pairs // len(hits[0]) + num_ranks - 1) // num_ranks
    everyone = not is_global or max(load) <= target
    chosen = []
    for t, row in enumerate(hits):
        if all(rank < 0 for rank in row):
            chosen.append(-1)
            continue
        candidates = range(num_ranks) if everyone else sorted({source, *row} - {-1})
        weights = {}
        for rank in candidates:
            room = max(target - load[rank], 0)
            weights[rank] = room if rank == source else room * 10 // 11
        total = sum(weights.values())
        if total == 0:
            best = source
            for rank in range(num_ranks) if everyone else row:
                if rank >= 0 and load[rank] * 11 < load[best] * 10:
                    best = rank
            chosen.append(best)
            continue
        u = ((t ^ (source * 0x9E3779B9 % 2**32)) * 1664525 + 1013904223) % 2**32 % total
        for rank in candidates:
            if u < weights[rank]:
                chosen.append(rank)
                break
            u -= weights[rank]
    return chosen


def least_maximum(load: list[int], candidates: list[list[int]]) -> int:
    """Return the least maximum load over every assignment there is."""
    best = None
    for choice in itertools.product(*candidates):
        total = list(load)
        for rank in choice:
            total[rank] += 1
        best = max(total) if best is None else min(best, max(total))
    return max(load) if best is None else best
