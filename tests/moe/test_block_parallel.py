# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks over ranks: every part of the sum once, simulated and over gloo."""

import pytest
import torch
import torch.distributed as dist

from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.expert_slice import ReduceGroups
from tests.moe import parallel_worker
from tests.moe.layer_cases import Mlp, TopKGate, make_layer
from tests.moe.parallel_worker import RANKS, expert_slice, parts_of, sharded_mlp, width_slice
from tests.moe.runner_cases import make_input

field_report = pytest.mark.field_report


class FakeGroup:
    """A process group that only says who is in it."""

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return self._ranks


@torch.no_grad()
@field_report("C6")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("defer", [True, False])
def test_what_the_ranks_return_sums_to_the_whole(ranks, replicated, defer):
    gate, layer, _, shared_gate = parts_of()
    shared = Mlp(width=12)
    # 1e3: a shared row counted twice, or not at all, cannot be missed
    shared.down_proj.weight.mul_(1e3)
    x = make_input(9)
    want = SharedExpertMoEBlock(gate, layer, shared, shared_gate)(x).double()
    total = torch.zeros_like(want)
    for rank in range(ranks):
        group = FakeGroup(rank, ranks)
        part = expert_slice(layer, rank, ranks, ep_group=group)
        mine = shared if replicated else sharded_mlp(shared, rank, ranks)
        block = SharedExpertMoEBlock(gate, part, mine, shared_gate, shared_is_replicated=replicated)
        total += block(x, defer=defer).double()
        if replicated and rank > 0:
            text = "shared experts: no, replicated, and added on the first rank of the group"
            assert text in block.last_plan.refusals
    assert (total - want).abs().max() <= 2.0**-20 * want.abs().max()


@torch.no_grad()
def test_the_first_rank_of_two_kinds_of_groups_adds_it():
    layer, x = make_layer(), make_input(3)
    called = []
    for ep in range(2):
        for tp in range(2):
            part = width_slice(layer, tp, 2, tp_group=FakeGroup(tp, 2), ep_group=FakeGroup(ep, 2))
            shared = Mlp()
            shared.register_forward_hook(lambda *args, at=(ep, tp): called.append(at))
            SharedExpertMoEBlock(TopKGate(), part, shared, shared_is_replicated=True)(x)
            assert part.groups.size == 4 and str(part.groups) == "ep 2 x tp 2"
    assert called == [(0, 0)]


@torch.no_grad()
def test_a_group_of_one_changes_nothing():
    layer, x = make_layer(), make_input(3)
    alone = expert_slice(layer, 0, 1, ep_group=FakeGroup(0, 1))
    shared, gate = Mlp(), TopKGate()
    want = SharedExpertMoEBlock(gate, layer, shared)(x)
    block = SharedExpertMoEBlock(
        gate, alone, shared, shared_is_replicated=True, reduce_results=True
    )
    assert torch.equal(block(x), want)
    assert block.last_plan.deferred
    groups = ReduceGroups(None, None)
    assert not groups.given and groups.size == 1 and groups.is_first_rank
    assert groups.reduce(x) is x and str(groups) == "one rank"


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch built with gloo"
)
def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(parallel_worker.run, (str(tmp_path / "store"),), nprocs=RANKS)
