# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The waterfill on a CPU: vectors, oracles, what each mode promises, errors, tracing."""

import itertools

import pytest
import torch

from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
    reference_waterfill,
    waterfill_topk_with_shared_expert,
)
from tests.ops import waterfill_cases as cases
from tests.ops.ep_topk_cases import assert_same, make_ids, vectors
from tests.ops.waterfill_cases import ORACLES, WORLD_SIZES, chosen_ranks

field_report = pytest.mark.field_report
waterfill = waterfill_topk_with_shared_expert
OP = torch.ops.sgl_moe_jit.waterfill_topk_with_shared_expert.default
VECTORS = vectors("waterfill")["cases"]
SIX_TOKENS = torch.tensor(VECTORS[0]["topk_ids"])


def ids_of(case):
    # "row t = [t % 2, 2 + t % 6], t = 0..63"
    return torch.tensor(case.get("topk_ids") or [[t % 2, 2 + t % 6] for t in range(64)])


def final_load(ids, out_ids, num_experts=8, world_size=4):
    load, _ = reference_waterfill.count(ids, num_experts, world_size)
    for shared in out_ids[:, -1].tolist():
        if shared >= 0:
            load[shared // (num_experts // world_size + 1)] += 1
    return load


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"].replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_vectors(case, dtype):
    ids = ids_of(case).to(dtype)
    weights = torch.ones(ids.shape)
    assert count_tokens_per_rank(ids, 8, 4, 0)[0].tolist() == case["load"]
    if "exact_quotas" in case:
        for source in range(4):  # the quotas are the same, whoever is home
            out, _ = waterfill(ids, weights, 8, 4, source)
            ranks = (out[:, -1] // 3).tolist()
            assert [ranks.count(r) for r in range(4)] == case["exact_quotas"]
            assert final_load(ids, out) == case["exact_final_load"]
    for source in range(4):
        out, _ = waterfill(ids, weights, 8, 4, source, mode="sampled", min_tokens=0)
        if f"sampled_source_{source}" in case:
            want = case[f"sampled_source_{source}"]
            assert out.tolist() == want["ids"] and final_load(ids, out) == want["final_load"]
        if "sampled_final_load_by_source" in case:
            assert final_load(ids, out) == case["sampled_final_load_by_source"][source]
    if "home_rank_0" in case:
        out, _ = waterfill(ids, weights, 8, 4, 0, min_tokens=7)
        assert out.tolist() == case["home_rank_0"]


# Rows with a candidate of room and without; all ranks allowed, as none is above the level.
@pytest.mark.parametrize(
    ("counts", "tokens", "shared"),
    [
        ([20, 8, 4, 4], [6, 6, 4, 2], [2, 5, 5, 8, 5, 11]),
        ([10, 9, 8, 9], [6, 4, 4, 4], [11, 5, 8, 11, 5, 8]),
    ],
)
def test_sampled_vectors_over_all_sources(counts, tokens, shared):
    out, _ = waterfill(
        *(SIX_TOKENS, torch.ones(6, 2), 8, 4, 0),
        mode="sampled",
        min_tokens=0,
        global_counts=torch.tensor(counts),
        tokens_per_rank=torch.tensor(tokens),
    )
    assert out[:, -1].tolist() == shared


@pytest.mark.parametrize("mode", ORACLES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_against_reference(mode, world_size):
    for seed in range(4 if world_size > 100 else 8):
        case = cases.make(seed, world_size)
        before = case.ids.clone()
        got = case.run(mode)
        assert_same(got, case.oracle(mode))
        assert_same(case.run(mode), got)  # again: the same bits
        assert torch.equal(case.ids, before)


@pytest.mark.parametrize("world_size", [2, 3, 8, 32, 72])
@pytest.mark.parametrize("skew", [0, 3, 30])
def test_exact_levels(world_size, skew):
    ids = make_ids(300, world_size * 4, 2, absent=0.1, skew=skew)
    for start in (0, world_size - 1):
        out, _ = waterfill(
            *(ids, torch.ones(ids.shape), world_size * 4, world_size, 1), remainder_start=start
        )
        before, tokens = reference_waterfill.count(ids, world_size * 4, world_size)
        after = final_load(ids, out, world_size * 4, world_size)
        quotas = [b - a for a, b in zip(before, after, strict=True)]
        assert sum(quotas) == tokens and min(quotas) >= 0
        assert max(after) <= max(*before, -(-(sum(before) + tokens) // world_size))
        filled = [x for x, quota in zip(after, quotas, strict=True) if quota]
        assert max(filled) - min(filled) <= 1
        assert min(after) >= max(filled) - 1  # nobody lower was passed by
        home = [r for r in (out[:, -1] // 5).tolist() if r == 1]
        assert len(home) == quotas[1]


def test_remainder_goes_to_ranks_from_its_start_on():
    ids = torch.tensor([[0], [2], [4], [6], [0], [2], [4], [6], [-1], [-1]])
    for start in range(4):
        ids[8:] = torch.tensor([[0], [4]])  # loads 3, 2, 3, 2 and 10 tokens: level 5
        out, _ = waterfill(ids, torch.ones(ids.shape), 8, 4, 0, remainder_start=start)
        assert final_load(ids, out) == [5, 5, 5, 5]
        out, _ = waterfill(ids[:9], torch.ones(9, 1), 8, 4, 0, remainder_start=start)
        load = final_load(ids[:9], out)  # 18 over 4: two ranks get one more
        assert [r for r in range(4) if load[r] == 5] == sorted({start, (start + 1) % 4})


@field_report("E5")
@pytest.mark.parametrize("world_size", [2, 3, 8, 40])
def test_all_sources_meet_one_set_of_quotas(world_size):
    """Each source from the same counts and its place among the tokens, without another message."""
    num_experts = world_size * 4
    sources = [
        make_ids(n, num_experts, 2, absent=0.2, seed=s, skew=4)
        for s, n in zip(range(world_size), itertools.cycle([50, 0, 17, 130]), strict=False)
    ]
    counts = sum(
        count_tokens_per_rank(ids, num_experts, world_size, s) for s, ids in enumerate(sources)
    )
    got = [0] * world_size
    tokens, stayed = 0, 0
    for source, ids in enumerate(sources):
        call = (ids, torch.ones(ids.shape), num_experts, world_size, source)
        out, _ = waterfill(*call, global_counts=counts[0], tokens_per_rank=counts[1])
        shared = out[:, -1]
        live = (ids >= 0).any(1)
        assert torch.equal(shared >= 0, live)  # once for each token, and for nothing else
        tokens += int(live.sum())
        for slot in shared[live].tolist():
            assert slot % 5 == 4
            got[slot // 5] += 1
            stayed += slot // 5 == source
    load = counts[0].tolist()
    assert got == reference_waterfill.quotas(load, tokens)
    at_home = [min(q, t) for q, t in zip(got, counts[1].tolist(), strict=True)]
    assert stayed == sum(at_home)  # no more could have


def test_tokens_are_mixed_and_not_in_runs():
    ids = torch.zeros(480, 1, dtype=torch.int64)  # all on rank 0: the others share the rest
    out, _ = waterfill(ids, torch.ones(480, 1), 32, 16, 3)
    ranks = (out[:, -1] // 3).tolist()
    assert [ranks.count(r) for r in range(16)] == [0] + [32] * 15
    away = [r for r in ranks if r != 3]
    runs = [len(list(group)) for _, group in itertools.groupby(away)]
    assert max(runs) <= 2
    home = [i for i, r in enumerate(ranks) if r == 3]
    assert {b - a for a, b in itertools.pairwise(home)} == {15}


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "world_size"),
    # Enough candidates; two, on few ranks; one; a chunk and more; hardly any tokens.
    [(256, 8, 32), (256, 2, 8), (100, 1, 4), (700, 2, 8), (600, 4, 16), (9, 4, 72), (64, 2, 2)],
)
@pytest.mark.parametrize("skew", [0, 1, 8])
def test_restricted_is_near_the_best_and_sends_nothing_twice(num_tokens, top_k, world_size, skew):
    most, best = restricted_most_and_best(num_tokens, top_k, world_size, skew)
    assert best <= most <= max(1.02 * best, best + 1), (most, best)


def test_restricted_with_two_experts_a_token_on_many_ranks():
    for num_tokens, world_size in ((512, 32), (1000, 32), (1000, 64)):
        most, best = restricted_most_and_best(num_tokens, 2, world_size, 0)
        assert best <= most <= 1.1 * best, (most, best, num_tokens, world_size)


def restricted_most_and_best(num_tokens, top_k, world_size, skew):
    num_experts = world_size * 4
    ids = make_ids(num_tokens, num_experts, top_k, absent=0.1, seed=num_tokens, skew=skew)
    numbers = (num_experts, world_size, 1)
    out, _ = waterfill(ids, torch.ones(ids.shape), *numbers, mode="exact_restricted")
    choices = [{e // 4 for e in row if e >= 0} for row in ids.tolist()]
    ranks = [-1 if x < 0 else x // 5 for x in out[:, -1].tolist()]
    for rank, choice in zip(ranks, choices, strict=True):
        assert rank in choice if choice else rank == -1
    load, _ = reference_waterfill.count(ids, num_experts, world_size)
    best = cases.least_maximum(load, [choice for choice in choices if choice])
    return max(final_load(ids, out, num_experts, world_size)), best


def test_the_best_there_is_by_hand():
    assert cases.least_maximum([3, 0, 0], [{0, 1}, {1}, {1, 2}]) == 3
    assert cases.least_maximum([0, 0], [{0}, {0, 1}, {0}, {0}]) == 3
    assert cases.least_maximum([0, 0, 0], [{0, 1}, {0, 1}, {1, 2}]) == 1


@pytest.mark.parametrize(("num_tokens", "at_home"), [(63, True), (64, False)])
def test_sampled_leaves_small_batches_at_home(num_tokens, at_home):
    ids = torch.tensor([[t % 2, 2 + t % 6] for t in range(num_tokens)])
    call = (ids, torch.ones(ids.shape), 8, 4, 1)
    home = expand_topk_with_shared_expert(*call)[0]
    assert torch.equal(waterfill(*call, mode="sampled")[0], home) == at_home
    for mode in ("exact", "exact_restricted"):
        assert not torch.equal(waterfill(*call, mode=mode)[0], home)


@pytest.mark.parametrize("mode", ORACLES)
def test_padding_alone_and_no_tokens(mode):
    ids = torch.full((70, 2), -1)
    out, weights = waterfill(ids, torch.rand(70, 2), 8, 4, 1, mode=mode, min_tokens=0)
    assert (out == -1).all() and (weights == 0).all()
    valid = torch.tensor(0)
    call = (torch.zeros_like(ids), torch.rand(70, 2), 8, 4, 1)
    out, weights = waterfill(*call, mode=mode, min_tokens=0, num_token_non_padded=valid)
    assert (out == -1).all() and (weights == 0).all()
    out, weights = waterfill(ids[:0], torch.rand(0, 2), 8, 4, 1, mode=mode)
    assert out.shape == weights.shape == (0, 3)


@pytest.mark.parametrize("mode", ORACLES)
@pytest.mark.parametrize("wrong", [0, 1, -5, 2**40, -(2**40)])
def test_wrong_counts_give_some_slot_all_the_same(mode, wrong):
    case = cases.make(3, 12, num_tokens=300)
    case.valid = None
    for counts, tokens in (([wrong] * 12, [7] * 12), ([7] * 12, [wrong] * 12)):
        case.counts, case.tokens = counts, tokens
        ranks = chosen_ranks(case, case.run(mode)[0])
        live = [max(row) >= 0 for row in case.ids.tolist()]
        assert [0 <= r < 12 for r in ranks] == live
