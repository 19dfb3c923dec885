# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Expanding, counting and the waterfill on a GPU, bit for bit against the CPU ops."""

import pytest
import torch

from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
    waterfill_topk_with_shared_expert,
)
from sgl_moe_jit.ops.waterfill_kernel import MODES, WaterfillPath, can_take_one_launch
from tests.ops import waterfill_cases as cases
from tests.ops.ep_topk_cases import assert_same, make_ids, make_weights
from tests.ops.waterfill_cases import WORLD_SIZES

pytestmark = pytest.mark.gpu
expand, count = expand_topk_with_shared_expert, count_tokens_per_rank
waterfill = waterfill_topk_with_shared_expert


# Nothing; one; a batch; one block of the count and more; many blocks.
@pytest.mark.parametrize("num_tokens", [0, 1, 70, 1500, 20_000])
@pytest.mark.parametrize(
    ("experts", "ranks", "top_k", "shared"),
    [(8, 1, 2, 1), (72, 72, 6, 1), (264, 8, 8, 2), (1024, 512, 8, 3), (12, 3, 1, 1)],
)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_expand_and_count(num_tokens, experts, ranks, top_k, shared, id_dtype, dtype):
    ids = make_ids(num_tokens, experts, top_k, absent=0.3, dtype=id_dtype)
    weights = make_weights(ids, dtype)
    numbers = (experts, ranks, ranks - 1)
    for valid in (None, torch.tensor(0), torch.tensor(40, dtype=torch.int32)):
        there = None if valid is None else valid.cuda()
        options = {"num_shared": shared, "num_token_non_padded": valid}
        want = expand(ids, weights, *numbers, 0.4, **options)
        options["num_token_non_padded"] = there
        assert_same(expand(ids.cuda(), weights.cuda(), *numbers, 0.4, **options), want)
        got = count(ids.cuda(), *numbers, num_token_non_padded=there)
        assert torch.equal(got.cpu(), count(ids, *numbers, num_token_non_padded=valid))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_both_paths_equal_the_cpu_op(mode, world_size):
    for seed in range(12):
        case = cases.make(seed, world_size)
        want = case.run(mode)
        for path in (None, *WaterfillPath):
            if path is WaterfillPath.ONE_LAUNCH and not can_take_one_launch(*case.ids.shape, mode):
                with pytest.raises(ValueError, match="path: one launch takes"):
                    case.run(mode, "cuda", path)
                continue
            assert_same(case.run(mode, "cuda", path), want)


# Both sides of a chunk, of one block's rows and of its ids.
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 9001])
@pytest.mark.parametrize("top_k", [1, 8, 9, 64])
@pytest.mark.parametrize("mode", MODES)
def test_boundaries(num_tokens, top_k, mode):
    for absent in (0.0, 0.2):
        ids = make_ids(num_tokens, 128, top_k, absent=absent, skew=3)
        weights = make_weights(ids)
        call = (128, 32, 5, 0.4)
        want = waterfill(ids, weights, *call, mode=mode, min_tokens=0)
        assert_same(waterfill(ids.cuda(), weights.cuda(), *call, mode=mode, min_tokens=0), want)


@pytest.mark.field_report("E5")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [200, 3000])
@pytest.mark.parametrize("dynamic", [False, True])
def test_capture_and_replay_with_changed_inputs(mode, num_tokens, dynamic):
    """Count, waterfill and expand in one graph: nothing is read back, nothing allocated anew."""
    ids = torch.zeros(num_tokens, 8, dtype=torch.int32, device="cuda")
    weights = torch.zeros(num_tokens, 8, device="cuda")
    valid = torch.tensor(num_tokens, device="cuda")

    def run(ids, weights, valid):
        options = {"num_token_non_padded": valid}
        counts = count(ids, 64, 16, 3, **options)
        shares = {"global_counts": counts[0], "tokens_per_rank": counts[1]} if dynamic else {}
        filled = waterfill(ids, weights, 64, 16, 3, 0.4, mode=mode, **shares, **options)
        return (*filled, *expand(ids, weights, 64, 16, 3, **options), counts)

    run(ids, weights, valid)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(ids, weights, valid)
    for seed in range(6):
        new_ids = make_ids(num_tokens, 64, 8, absent=0.1 * seed, seed=seed, skew=seed)
        new = new_ids, make_weights(new_ids), torch.tensor(num_tokens - 37 * seed)
        for old, value in zip((ids, weights, valid), new, strict=True):
            old.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        want = run(*new)
        assert_same(got[:2], want[:2])
        assert_same(got[2:4], want[2:4])
        assert torch.equal(got[4].cpu(), want[4])
        assert torch.equal(ids.cpu(), new[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [256, 5000])
def test_ids_written_just_before_on_the_same_stream(mode, num_tokens, monkeypatch):
    """Back to back, with and without programmatic launch: the same bits, and no stale read."""
    batches = [make_ids(num_tokens, 64, 8, absent=0.1, seed=s, skew=s) for s in range(6)]
    weights = torch.ones(num_tokens, 8)
    sources, there = [x.cuda() for x in batches], weights.cuda()
    ids = torch.empty_like(sources[0])
    for pdl in ("1", "0"):
        monkeypatch.setenv("SGL_MOE_JIT_PDL", pdl)
        results = []
        for source in sources:
            ids.copy_(source)
            results.append(waterfill(ids, there, 64, 32, 3, mode=mode))
        for got, batch in zip(results, batches, strict=True):
            assert_same(got, waterfill(batch, weights, 64, 32, 3, mode=mode))


def test_on_a_side_stream():
    ids, weights = make_ids(300, 64, 4), torch.ones(300, 4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = ids.cuda()
        torch.cuda._sleep(10_000_000)
        got = waterfill(there + 0, weights.cuda(), 64, 8, 2)
    stream.synchronize()
    assert_same(got, waterfill(ids, weights, 64, 8, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_that_there_are_not(mode, dtype, monkeypatch):
    """Not an error without a check, and never a fault: they count for the last rank, stay apart."""
    largest = torch.iinfo(dtype).max
    ids = torch.tensor([[0, 8], [largest, 1], [largest - 4, 7]] * 30, dtype=dtype, device="cuda")
    weights = torch.ones(ids.shape, device="cuda")
    out, _ = waterfill(ids, weights, 8, 4, 0, mode=mode)
    assert out[:3, :2].tolist() == [[0, 12], [largest, 1], [largest, 10]]
    assert count(ids, 8, 4, 0)[0].tolist() == [60, 0, 0, 120]
    assert all(shared in (2, 5, 8, 11) for shared in out[:, 2].tolist())
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_INDICES", "1")
    for call in (waterfill, expand):
        with pytest.raises(ValueError, match="topk_ids: expected ids below 8"):
            call(ids, weights, 8, 4, 0)
    with pytest.raises(ValueError, match="topk_ids: expected ids below 8"):
        count(ids, 8, 4, 0)
    last = torch.tensor(0, device="cuda")
    assert (waterfill(ids, weights, 8, 4, 0, num_token_non_padded=last)[0] == -1).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", [0, -5, 2**40, -(2**40), 2**62])
def test_wrong_counts_give_some_slot_all_the_same(mode, wrong):
    ids, weights = make_ids(300, 64, 4).cuda(), torch.ones(300, 4).cuda()
    right = torch.full((12,), 7, device="cuda")
    for counts in ((right + wrong, right), (right, right + wrong)):
        shares = dict(zip(("global_counts", "tokens_per_rank"), counts, strict=True))
        out, _ = waterfill(ids[:, :2] // 6, weights[:, :2], 12, 12, 5, mode=mode, **shares)
        assert set(out[:, 2].tolist()) <= set(range(1, 24, 2))


def test_devices_must_agree_and_zero_tokens_leave_no_error():
    ids, weights = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="topk_weights: expected device cuda:0"):
        expand(ids.cuda(), weights, 8, 4, 0)
    counts = torch.ones(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="global_counts: expected device cuda:0"):
        waterfill(
            *(ids.cuda(), weights.cuda(), 8, 4, 0), global_counts=counts, tokens_per_rank=counts
        )
    for mode in MODES:
        assert waterfill(ids[:0].cuda(), weights[:0].cuda(), 8, 4, 0, mode=mode)[0].numel() == 0
    assert count(ids[:0].cuda(), 8, 4, 0).sum() == 0
    torch.cuda.synchronize()
