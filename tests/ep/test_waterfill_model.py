# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator's policies against the ops: the same rank for every token, or one of them is wrong.

Neither knows the other: the policies are numpy over all rows at once, the ops compiled kernels.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sgl_moe_jit.bench import ep_simulate_policies as policies
from sgl_moe_jit.bench.ep_simulate_policies import View, count_pairs
from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
    waterfill_topk_with_shared_expert,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "waterfill.json").read_text())
MODES = {
    "exact": policies.exact,
    "exact_restricted": policies.exact_restricted,
    "sampled": policies.sampled,
}
# W, L, K, N: one rank; a prime; no power of two; around 64 rows; past one and two chunks of 256;
# more ranks than a row of a warp
SIZES = [
    (1, 4, 2, 7),
    (7, 1, 3, 63),
    (6, 3, 4, 64),
    (12, 2, 8, 257),
    (32, 8, 8, 520),
    (72, 4, 8, 130),
]


def shared_ranks(ids: torch.Tensor, local: int) -> list[int]:
    """Return the rank of each row's last column."""
    last = ids[:, -1]
    assert ((last < 0) | (last % (local + 1) == local)).all()
    return torch.where(last < 0, -1, last // (local + 1)).tolist()


def hits_of(ids: np.ndarray, local: int) -> np.ndarray:
    return np.where(ids < 0, -1, ids // local)


def random_ids(seed: int, num_ranks: int, local: int, top_k: int, num_tokens: int) -> np.ndarray:
    """Return [W, N, K] of a skewed choice in which some ids, and some rows, are -1."""
    rng = np.random.default_rng(seed)
    odds = rng.random(num_ranks * local) ** 3
    ids = rng.choice(num_ranks * local, (num_ranks, num_tokens, top_k), p=odds / odds.sum())
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[rng.random(ids.shape[:2]) < 0.1] = -1
    return ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[3]}")
@pytest.mark.parametrize("is_global", [False, True], ids=["static", "dynamic"])
def test_the_policies_are_the_ops(mode, size, is_global):
    num_ranks, local, top_k, num_tokens = size
    ids = random_ids(num_tokens, num_ranks, local, top_k, num_tokens)
    hits = hits_of(ids, local)
    weights = torch.rand(num_tokens, top_k)
    numbers = (num_ranks * local, num_ranks)
    tensors = [torch.from_numpy(own) for own in ids]
    counted = sum(
        count_tokens_per_rank(own, *numbers, source) for source, own in enumerate(tensors)
    )
    assert counted[0].tolist() == count_pairs(hits, num_ranks).tolist()
    assert counted[1].tolist() == (hits >= 0).any(axis=2).sum(axis=1).tolist()
    chosen = policies.decide(MODES[mode], hits, is_global)
    for source in sorted({0, num_ranks // 2, num_ranks - 1}):
        options = {"remainder_start": source}
        if is_global:
            options = {"global_counts": counted[0], "tokens_per_rank": counted[1]}
        got, _ = waterfill_topk_with_shared_expert(
            tensors[source], weights, *numbers, source, mode=mode, **options
        )
        assert shared_ranks(got, local) == chosen[source].tolist()


def test_home_is_the_expand_op():
    ids = random_ids(1, 5, 2, 3, 40)
    chosen = policies.decide(policies.home, hits_of(ids, 2), False)
    for source, own in enumerate(ids):
        got, _ = expand_topk_with_shared_expert(
            torch.from_numpy(own), torch.rand(40, 3), 10, 5, source
        )
        assert shared_ranks(got, 2) == chosen[source].tolist()


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_the_policies_are_the_ops_on_the_vectors(case):
    ranks, local = VECTORS["ranks"], VECTORS["experts"] // VECTORS["ranks"]
    ids = np.array(case.get("topk_ids") or [[t % 2, 2 + t % 6] for t in range(64)])
    hits = hits_of(ids, local)
    rows = np.zeros(ranks, np.int64)
    for source in range(ranks):
        rows[:] = 0
        rows[source] = (hits >= 0).any(axis=1).sum()
        view = View(hits, source, count_pairs(hits, ranks), rows, 0, False)
        for mode, policy in (*MODES.items(), ("sampled", policies.sampled_at_any_size)):
            got, _ = waterfill_topk_with_shared_expert(
                torch.from_numpy(ids),
                torch.rand(ids.shape),
                VECTORS["experts"],
                ranks,
                source,
                mode=mode,
                min_tokens=0 if policy is policies.sampled_at_any_size else None,
            )
            assert shared_ranks(got, local) == policy(view).tolist()
