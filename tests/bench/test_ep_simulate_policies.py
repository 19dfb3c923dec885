# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator's policies: every vector, scalar oracles, conservation and bounds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from sgl_moe_jit.bench import ep_simulate_policies as policies
from sgl_moe_jit.bench.ep_simulate_optimum import restricted_optimum
from sgl_moe_jit.bench.ep_simulate_policies import View, count_pairs, decide, level_quotas
from sgl_moe_jit.bench.ep_simulate_routing import ROUTINGS, place, redundant_experts, synthetic
from tests.bench.ep_oracles import add_rows_one_by_one, least_maximum, sampled_ranks

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "waterfill.json").read_text())
RANKS, LOCAL = VECTORS["ranks"], VECTORS["experts"] // VECTORS["ranks"]
CASES = {case["name"]: case for case in VECTORS["cases"]}
ALL = [policies.home, policies.sampled, policies.exact, policies.exact_restricted]
# ranks: one, a prime, no power of two, past 64; tokens around the sampled rule's 64
SIZES = [(1, 5), (2, 64), (3, 63), (7, 80), (12, 33), (72, 70)]


def hits_of(case) -> np.ndarray:
    ids = case.get("topk_ids") or [[t % 2, 2 + t % 6] for t in range(64)]
    ids = np.array(ids)
    return np.where(ids < 0, -1, ids // LOCAL)


def own_view(hits, source, num_ranks=RANKS, start=0) -> View:
    rows = np.zeros(num_ranks, np.int64)
    rows[source] = (hits >= 0).any(axis=1).sum()
    return View(hits, source, count_pairs(hits, num_ranks), rows, start, False)


def final_load(hits, chosen, num_ranks=RANKS) -> list[int]:
    return (count_pairs(hits, num_ranks) + count_pairs(chosen, num_ranks)).tolist()


def random_hits(rng, num_ranks, num_tokens, top_k=4) -> np.ndarray:
    """Return [W, N, K] of a skewed choice in which some ids, and some rows, are -1."""
    weight = np.arange(1, num_ranks + 1) ** -1.0
    shape = (num_ranks, num_tokens, top_k)
    hits = rng.choice(num_ranks, size=shape, p=weight / weight.sum())
    hits[rng.random(shape) < 0.1] = -1
    hits[rng.random(shape[:2]) < 0.1] = -1
    return hits


@pytest.mark.parametrize("name", CASES)
def test_every_vector(name):
    case = CASES[name]
    hits = hits_of(case)
    assert count_pairs(hits, RANKS).tolist() == case["load"]
    if "home_rank_0" in case:
        ranks = [row[-1] // (LOCAL + 1) for row in case["home_rank_0"]]
        assert policies.home(own_view(hits, 0)).tolist() == ranks
    if "exact_quotas" in case:
        assert level_quotas(np.array(case["load"]), len(hits)).tolist() == case["exact_quotas"]
        chosen = policies.exact(own_view(hits, 0))
        assert final_load(hits, chosen) == case["exact_final_load"]
    for source in range(RANKS):
        want = case.get(f"sampled_source_{source}")
        if want:
            ranks = [-1 if row[-1] < 0 else row[-1] // (LOCAL + 1) for row in want["ids"]]
            assert policies.sampled_at_any_size(own_view(hits, source)).tolist() == ranks
            assert final_load(hits, np.array(ranks)) == want["final_load"]
        if "sampled_final_load_by_source" in case:
            chosen = policies.sampled(own_view(hits, source))
            assert final_load(hits, chosen) == case["sampled_final_load_by_source"][source]


@pytest.mark.parametrize(
    ("counts", "tokens", "ranks"),
    [
        ([20, 8, 4, 4], [6, 6, 4, 2], [0, 1, 1, 2, 1, 3]),  # rank 0 above the level: restricted
        ([10, 9, 8, 9], [6, 4, 4, 4], [3, 1, 2, 3, 1, 2]),  # nobody above it
    ],
)
def test_the_sampled_rule_with_global_counts(counts, tokens, ranks):
    hits = hits_of(CASES["six tokens"])
    view = View(hits, 0, np.array(counts), np.array(tokens), 0, True)
    assert policies.sampled_at_any_size(view).tolist() == ranks


@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES)
@pytest.mark.parametrize("is_global", [False, True], ids=["own", "global"])
def test_the_sampled_rule_against_scalars(num_ranks, num_tokens, is_global):
    hits = random_hits(np.random.default_rng(num_ranks), num_ranks, num_tokens)
    counts = count_pairs(hits, num_ranks)
    rows = (hits >= 0).any(axis=2).sum(axis=1)
    args = (counts.tolist(), rows.tolist()) if is_global else ()
    want = [
        sampled_ranks(own.tolist(), source, num_ranks, *args)
        if num_tokens >= 64
        else [source if max(row) >= 0 else -1 for row in own.tolist()]
        for source, own in enumerate(hits)
    ]
    assert decide(policies.sampled, hits, is_global).tolist() == want


def test_quotas_level_as_adding_row_by_row_does():
    rng = random.Random(3)
    for _ in range(300):
        load = [rng.randrange(12) for _ in range(rng.randrange(1, 9))]
        num_rows, start = rng.randrange(30), rng.randrange(9)
        quotas = level_quotas(np.array(load), num_rows, start)
        total = [a + b for a, b in zip(load, quotas.tolist(), strict=True)]
        assert quotas.min() >= 0 and quotas.sum() == num_rows
        assert max(total) == add_rows_one_by_one(load, num_rows)
        # Ranks that got rows differ by one at most, and who is one higher comes first from start.
        given = [r for r in range(len(load)) if quotas[r]]
        if given:
            top = max(total[r] for r in given)
            low = min(total)
            assert top - low <= 1 and all(total[r] >= top - 1 for r in given)
            could = [r for r in range(len(load)) if load[r] < top and low < top]
            could.sort(key=lambda r: (r - start) % len(load))
            high = [total[r] == top for r in could]
            assert high == sorted(high, reverse=True)


@pytest.mark.parametrize("policy", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_global", [False, True], ids=["own", "global"])
@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES)
def test_every_live_row_gets_one_rank_and_no_other(policy, is_global, num_ranks, num_tokens):
    hits = random_hits(np.random.default_rng(num_tokens), num_ranks, num_tokens)
    before = hits.copy()
    chosen = decide(policy, hits, is_global)
    live = (hits >= 0).any(axis=2)
    assert (hits == before).all()
    assert (chosen[~live] == -1).all() and (chosen[live] >= 0).all() and chosen.max() < num_ranks
    assert (decide(policy, hits, is_global) == chosen).all()


@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES)
def test_exact_with_global_counts_reaches_the_bound(num_ranks, num_tokens):
    for seed in range(3):
        hits = random_hits(np.random.default_rng(seed), num_ranks, num_tokens)
        chosen = decide(policies.exact, hits, True)
        load = final_load(hits, chosen, num_ranks)
        routed = count_pairs(hits, num_ranks)
        assert max(load) == max(routed.max(), -(-sum(load) // num_ranks))
        # What a rank can take of its own rows it takes.
        rows = (hits >= 0).any(axis=2).sum(axis=1)
        quotas = level_quotas(routed, int(rows.sum()))
        # All sources together meet the quotas, each with its own part of them.
        assert (count_pairs(chosen, num_ranks) == quotas).all()
        stayed = (chosen == np.arange(num_ranks)[:, None]).sum(axis=1)
        assert (stayed == np.minimum(quotas, rows)).all()


@pytest.mark.parametrize(("num_ranks", "num_tokens"), SIZES)
def test_exact_with_own_counts_levels_what_the_source_sends(num_ranks, num_tokens):
    hits = random_hits(np.random.default_rng(1), num_ranks, num_tokens)
    chosen = decide(policies.exact, hits, False)
    for own, mine in zip(hits, chosen, strict=True):
        load = final_load(own, mine, num_ranks)
        assert max(load) == max(count_pairs(own, num_ranks).max(), -(-sum(load) // num_ranks))


@pytest.mark.parametrize("is_global", [False, True], ids=["own", "global"])
def test_restricted_adds_no_copy(is_global):
    for num_ranks, num_tokens in SIZES:
        hits = random_hits(np.random.default_rng(2), num_ranks, num_tokens)
        chosen = decide(policies.exact_restricted, hits, is_global)
        assert (hits == chosen[:, :, None]).any(axis=2).all()  # -1 where all are


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(8, 256), (32, 256), (12, 512)])
def test_restricted_is_near_the_optimum_of_what_it_knows(kind, num_ranks, num_tokens):
    # With own counts: of each source by itself. With global counts: of all together.
    ids, popularity = synthetic(kind, 256, 8, num_ranks, num_tokens, 1)
    placed = place(popularity, num_ranks, redundant_experts(kind, 256, num_ranks))
    hits = np.stack([placed.owners(own) for own in ids])
    for own in hits[:3]:
        chosen = policies.exact_restricted(own_view(own, 0, num_ranks))
        load = count_pairs(own, num_ranks)
        got = max(final_load(own, chosen, num_ranks))
        best = restricted_optimum(load, own, chosen).max_load
        assert best <= got <= max(1.02 * best, best + 1)
    chosen = decide(policies.exact_restricted, hits, True)
    got = max(final_load(hits, chosen, num_ranks))
    flat = hits.reshape(-1, hits.shape[2])
    best = restricted_optimum(count_pairs(hits, num_ranks), flat, chosen.ravel()).max_load
    assert best <= got <= 1.02 * best


def test_the_optimum_against_every_assignment():
    rng = random.Random(5)
    for _ in range(150):
        num_ranks, num_tokens = rng.randrange(1, 5), rng.randrange(6)
        load = [rng.randrange(5) for _ in range(num_ranks)]
        candidates = [[rng.randrange(num_ranks) for _ in range(2)] for _ in range(num_tokens)]
        table = np.array(candidates, dtype=np.int64).reshape(num_tokens, 2)
        got = restricted_optimum(np.array(load), table, table[:, 0])
        assert got.max_load == least_maximum(load, candidates)
        assert all(c in row for c, row in zip(got.chosen.tolist(), candidates, strict=True))
        total = np.array(load) + np.bincount(got.chosen, minlength=num_ranks)
        assert total.max() == got.max_load


def test_the_optimum_proves_itself():
    # No assignment is below: the rows that cannot leave `tight` do not fit there one level lower.
    kinds = set()
    for seed in range(25):
        rng = np.random.default_rng(seed)
        num_ranks = int(rng.integers(2, 20))
        load = rng.integers(0, (4, 40)[seed % 2], num_ranks)
        candidates = rng.integers(0, num_ranks, (100, 2)) // (1 + seed % 3)
        got = restricted_optimum(load, candidates, candidates[:, 0])
        confined = np.isin(candidates, got.tight).all(axis=1).sum()
        assert load[got.tight].sum() + confined > len(got.tight) * (got.max_load - 1)
        kinds.add(
            "one" if len(got.tight) == 1 else "all" if len(got.tight) == num_ranks else "some"
        )
    assert kinds == {"one", "all", "some"}
