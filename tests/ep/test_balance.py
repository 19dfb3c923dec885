# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""WaterfillBalancer: each source alone, and all sources over a group."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sgl_moe_jit.ep import EpLayout, WaterfillBalancer
from sgl_moe_jit.ep.balance_checks import device_of
from sgl_moe_jit.ops import (
    expand_topk_with_shared_expert,
    reference_waterfill,
    waterfill_topk_with_shared_expert,
)
from tests.ops.ep_topk_cases import assert_same, make_ids

LAYOUT = EpLayout(num_experts=14, num_redundant=2, ep_size=4)
MODES = ("exact", "exact_restricted", "sampled")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [0, 3])
def test_static_is_the_op_starting_at_its_own_rank(mode, rank):
    ids = make_ids(100, 16, 3, absent=0.2)
    weights, valid = torch.rand(100, 3), torch.tensor(91)
    got = WaterfillBalancer(LAYOUT, rank, mode=mode)(ids, weights, 0.4, valid)
    want = waterfill_topk_with_shared_expert(
        *(ids, weights, 16, 4, rank, 0.4),
        mode=mode,
        remainder_start=rank,
        num_token_non_padded=valid,
    )
    assert_same(got, want)


def test_static_sources_spread_what_does_not_divide():
    """One token each, from level loads: were all to start at rank 0, it would get all four."""
    ids = torch.tensor([[0, 4, 8, 12]])
    chosen = [
        int(WaterfillBalancer(LAYOUT, rank)(ids, torch.ones(1, 4))[0][0, -1]) for rank in range(4)
    ]
    assert sorted(chosen) == [LAYOUT.shared_id(rank) for rank in range(4)]


@pytest.mark.parametrize("num_tokens", [5, 8])
def test_min_tokens(num_tokens):
    ids = torch.zeros(num_tokens, 1, dtype=torch.int32)
    weights = torch.ones(num_tokens, 1)
    home = expand_topk_with_shared_expert(ids, weights, 16, 4, 0)[0]
    got, _ = WaterfillBalancer(LAYOUT, 0, min_tokens=8)(ids, weights)
    assert torch.equal(got, home) == (num_tokens < 8)


class ThreadedGroup:
    """An all-reduce over threads in place of a process group; counts how often it is joined."""

    def __init__(self, size):
        self.size, self.joined = size, [0] * size
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts = [None] * size
        self.local = threading.local()

    def all_reduce(self, x, group):
        assert group is self
        self.joined[self.local.rank] += 1
        self._parts[self.local.rank] = x.clone()
        self._barrier.wait()
        total = sum(self._parts)
        self._barrier.wait()
        x.copy_(total)

    def run(self, body):
        results = [None] * self.size

        def thread(rank):
            self.local.rank = rank
            results[rank] = body(rank)

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return results


@pytest.fixture
def group(monkeypatch):
    group = ThreadedGroup(4)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.local.rank)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: group.all_reduce(x, group))
    return group


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(70, 0, 63, 5), (0, 0, 0, 0), (64, 64, 64, 64), (0, 0, 0, 9)])
def test_dynamic_joins_once_and_levels_all(group, mode, sizes):
    batches = [make_ids(n, 16, 3, absent=0.2, seed=i, skew=6) for i, n in enumerate(sizes)]

    def body(rank):
        balancer = WaterfillBalancer(LAYOUT, rank, mode=mode, group=group, dynamic=True)
        return balancer(batches[rank], torch.ones(batches[rank].shape))[0]

    outputs = group.run(body)
    assert group.joined == [1] * 4
    counts = [reference_waterfill.count(ids, 16, 4) for ids in batches]
    load = [sum(x) for x in zip(*(pairs for pairs, _ in counts), strict=True)]
    chosen = LAYOUT.owner_rank(torch.cat(outputs)[:, -1])
    got = [int((chosen == rank).sum()) for rank in range(4)]
    assert sum(got) == sum(tokens for _, tokens in counts)  # each token's shared expert once
    if mode == "exact":
        assert got == reference_waterfill.quotas(load, sum(got))
    for ids, out in zip(batches, outputs, strict=True):
        assert torch.equal(out[:, :-1], LAYOUT.to_dispatch(ids))


def _process(rank, path, num_tokens):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    layout = EpLayout(num_experts=8, ep_size=2)
    ids = torch.zeros(num_tokens[rank], 1, dtype=torch.int32)  # all on rank 0
    out, _ = WaterfillBalancer(layout, rank, dynamic=True)(ids, torch.ones(ids.shape))
    chosen = layout.owner_rank(out[:, -1]).tolist()
    # 7 pairs on rank 0 and 7 shared experts: all go to rank 1, the other way round none would
    assert chosen == [1] * num_tokens[rank], (rank, chosen)
    with pytest.raises(ValueError, match="group: expected 4 ranks"):
        WaterfillBalancer(LAYOUT, rank, dynamic=True)
    dist.destroy_process_group()


def test_two_processes_one_without_tokens(tmp_path):
    mp.spawn(_process, args=(str(tmp_path / "store"), (7, 0)), nprocs=2)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"layout": 4}, TypeError, "layout: expected an EpLayout, got int"),
        ({"layout": EpLayout(8, ep_size=4, num_shared=2)}, ValueError, "layout: expected num_sh"),
        ({"rank": 4}, ValueError, "rank: expected 0 <= rank < ep_size, 4, got 4"),
        ({"mode": "best"}, ValueError, "mode: expected one of exact"),
        ({"remainder_start": 4}, ValueError, "remainder_start: expected 0 <= .*, got 4"),
        ({"group": object()}, ValueError, "group: expected None without dynamic=True"),
        ({"dynamic": True}, ValueError, "group: expected an initialised torch.distributed"),
    ],
)
def test_errors(change, error, match):
    call = {"layout": LAYOUT, "rank": 0, **change}
    with pytest.raises(error, match=match):
        WaterfillBalancer(call.pop("layout"), call.pop("rank"), **call)


@pytest.mark.parametrize("wrong", [{"ids": 16}, {"ids": "list"}, {"weights": torch.float64}])
def test_a_source_that_refuses_joins_the_others_first(group, wrong):
    """Else they would wait in the all-reduce. Its counts are 0; theirs are levelled."""
    ids = torch.zeros(5, 1, dtype=torch.int32)

    def body(rank):
        mine = torch.full_like(ids, wrong["ids"]) if wrong.get("ids") == 16 and rank == 2 else ids
        mine = mine.tolist() if wrong.get("ids") == "list" and rank == 2 else mine
        weights = torch.ones(ids.shape).to(wrong.get("weights") if rank == 2 else None)
        balancer = WaterfillBalancer(LAYOUT, rank, dynamic=True, group=group)
        if rank != 2:
            return balancer(mine, weights)[0]
        with pytest.raises((TypeError, ValueError), match=r"topk_(ids|weights): expected"):
            balancer(mine, weights)
        return ids[:0]

    outputs = group.run(body)
    assert group.joined == [1] * 4
    assert all(out is not None for out in outputs)


def test_a_source_that_does_not_call_stops(group):
    """It joins with counts of 0: the others get what they would, had it no tokens."""
    ids = make_ids(5, 16, 3, seed=1)

    def body(rank, stops):
        balancer = WaterfillBalancer(LAYOUT, rank, dynamic=True, group=group)
        if rank != 2:
            return balancer(ids, torch.ones(ids.shape))[0]
        if stops:
            assert balancer.stop(torch.device("cpu"))
        else:
            balancer(ids[:0], torch.ones(0, 3))
        return ids[:0]

    got, want = (group.run(lambda rank, stops=stops: body(rank, stops)) for stops in (True, False))
    assert group.joined == [2] * 4
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_static_source_has_nobody_to_join():
    assert WaterfillBalancer(LAYOUT, 2).stop(torch.device("cpu"))


def test_a_source_that_refuses_joins_on_the_device_of_what_is_a_tensor():
    assert device_of([0], torch.ones(1, device="meta"), None) == torch.device("meta")
    assert device_of([0], None) == torch.device("cpu")
