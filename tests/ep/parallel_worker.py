# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each of three gloo processes checks of dispatch and block."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sgl_moe_jit.ep.balance import WaterfillBalancer
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from tests.ep.ep_cases import (
    FixedGate,
    H,
    SharedMlp,
    Whole,
    check_output,
    choose,
    random,
)
from tests.process_group import joined

RANKS = 3
MODES = (
    {"sum_at": "source"},
    {"sum_at": "experts"},
    {"sum_at": "source", "stage_through_host": True},
    {"sum_at": "experts", "max_tokens_per_rank": 6},
)
# Tokens of each rank: some everywhere, none on each rank in turn, on one alone, none at all.
TOKENS = ((4, 2, 6), (0, 3, 5), (3, 0, 5), (3, 5, 0), (0, 4, 0), (0, 0, 0))


def run_block(group, layout, whole, num_tokens, mode, dtype):
    """One call of a fused block on this rank; its output is checked."""
    rank = group.rank()
    x = (random(20 + rank, num_tokens, H) * H**0.5).to(dtype)
    ids, weights = choose(rank, num_tokens, layout.num_experts, 3, absent=0.1)
    mlp = SharedMlp(whole)
    block = SharedExpertMoEBlock(
        FixedGate(ids, weights, 2.5), whole.fused(layout, rank), mlp, shared_is_fused=True
    )
    path = ExpertParallelPath(
        TorchDispatcher(group, layout.num_local, **mode), HomeExpander(layout, rank)
    )
    output = block.forward_deepep(x, path)
    check_output(output, whole, x, ids, weights, 2.5)
    assert mlp.calls == 0
    return output


def check(rank):
    """Everything that one rank checks."""
    world = dist.group.WORLD
    layout = EpLayout(6, ep_size=RANKS, num_shared=2)
    for dtype in (torch.float32, torch.bfloat16):
        whole = Whole.make(6, 2, dtype)
        for tokens in TOKENS:
            outputs = [run_block(world, layout, whole, tokens[rank], mode, dtype) for mode in MODES]
            assert torch.equal(outputs[0], outputs[2])  # the host's memory changes no bit
            assert torch.equal(outputs[1], outputs[3])  # nor does the fixed size
    check_refusals(world, rank)
    check_balanced(world, rank)
    check_stopped(dist.new_group(timeout=timedelta(seconds=20)), rank)
    # Ranks of a part of the world, in another order: 2 is its first, 0 its second.
    pair = dist.new_group([2, 0], sort_ranks=False)
    if rank != 1:
        whole = Whole.make(6)
        for mode in MODES:
            run_block(pair, EpLayout(6, ep_size=2), whole, 3 + rank, mode, torch.float32)


def check_balanced(group, rank):
    """All routed experts on rank 0, shared ones where there is room: same sums, level loads."""
    layout, whole = EpLayout(9, ep_size=RANKS), Whole.make(9)
    for tokens in ((8, 4, 6), (0, 5, 7)):
        x = random(20 + rank, tokens[rank], H) * H**0.5
        ids, weights = choose(rank, tokens[rank], 3, 2)  # of rank 0's three
        for mode in MODES[:2]:
            for dynamic in (False, True):
                sent = []
                balancer = WaterfillBalancer(
                    layout, rank, group=group if dynamic else None, dynamic=dynamic
                )
                path = ExpertParallelPath(
                    TorchDispatcher(group, layout.num_local, **mode),
                    lambda *a, balancer=balancer, sent=sent: sent.append(balancer(*a)) or sent[-1],
                )
                block = SharedExpertMoEBlock(
                    FixedGate(ids, weights, 2.5), whole.fused(layout, rank), shared_is_fused=True
                )
                check_output(block.forward_deepep(x, path), whole, x, ids, weights, 2.5)
                shared = torch.bincount(sent[0][0][:, -1] // layout.num_local, minlength=RANKS)
                dist.all_reduce(shared, group=group)
                # rank 0 is fullest anyway: the others share what all tokens bring
                assert shared[0] == 0 and sum(shared.tolist()) == sum(tokens)
                if dynamic:
                    assert abs(int(shared[1] - shared[2])) <= 1


def check_refusals(group, rank):
    """One rank's mistake is every rank's error, and the group goes on working."""
    dispatcher = TorchDispatcher(group, 3)
    x, weights = torch.ones(2, H), torch.ones(2, 2)
    ids = torch.tensor([[0, 4], [8, 9 if rank == 1 else 2]])
    with pytest.raises(ValueError, match="out of range: 1 on rank 1"):
        dispatcher.dispatch(x, ids, weights)
    rows = dispatcher.dispatch(x, ids.clamp(max=8), weights)
    assert rows.hidden_states.shape[1] == H


def check_stopped(group, rank):
    """One rank stops before its balancer or in it; the others are told, and the group lives on."""
    layout, whole = EpLayout(6, ep_size=RANKS), Whole.make(6)
    ids, weights = choose(rank, 3, 6, 2)
    x = random(20 + rank, 3, H) * H**0.5
    for options in ({}, {"mode": "exact_restricted", "max_tokens_per_rank": 4}):
        balancer = WaterfillBalancer(layout, rank, group=group, dynamic=True, **options)
        path = ExpertParallelPath(TorchDispatcher(group, layout.num_local), balancer)
        gate = FixedGate(ids, weights)
        block = SharedExpertMoEBlock(gate, whole.fused(layout, rank), shared_is_fused=True)
        check_output(block.forward_deepep(x, path), whole, x, ids, weights)
        wrong, text = (x[:, 1:], "hidden_states: expected") if rank == 1 else (x, "rank 1 stopped")
        with pytest.raises(ValueError, match=text):
            block.forward_deepep(wrong, path)
        if rank == 1:
            with pytest.raises(TypeError, match="topk_ids: expected a Tensor, got list"):
                balancer(ids.tolist(), weights)
        else:
            balancer(ids, weights)
        check_output(block.forward_deepep(x, path), whole, x, ids, weights)


def run(rank, store):
    """Entry of one process."""
    with joined(rank, store, RANKS):
        check(rank)
