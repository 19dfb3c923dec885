# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each of two gloo processes checks of a block that is spread over them."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.layer import FusedMoE
from tests.moe.layer_cases import WIDTH, Mlp, TopKGate, make_layer
from tests.moe.runner_cases import make_input
from tests.process_group import joined

RANKS = 2


def sharded_mlp(whole, rank, ranks):
    """One rank's slice of an ``Mlp``, on views of it."""
    width = whole.up_proj.weight.shape[0] // ranks
    part = Mlp(width=width)
    rows = slice(rank * width, (rank + 1) * width)
    for name in ("gate_proj", "up_proj"):
        getattr(part, name).weight = torch.nn.Parameter(getattr(whole, name).weight[rows])
    part.down_proj.weight = torch.nn.Parameter(whole.down_proj.weight[:, rows])
    return part


def expert_slice(whole, rank, ranks, **options):
    """One rank's experts of a ``FusedMoE``, on views of it."""
    count = whole.num_local_experts // ranks
    first = rank * count
    up, down = (p.detach()[first : first + count] for p in whole.parameters())
    return FusedMoE.from_w13_w2(up, down, expert_range=(first, count), **options)


def width_slice(whole, rank, ranks, **options):
    """One rank's slice of every expert of a ``FusedMoE``."""
    width = WIDTH // ranks
    rows = slice(rank * width, (rank + 1) * width)
    up, down = (p.detach() for p in whole.parameters())
    gate, linear = up.chunk(2, dim=1)
    return FusedMoE.from_w13_w2(
        torch.cat((gate[:, rows], linear[:, rows]), 1), down[..., rows].contiguous(), **options
    )


def parts_of(seed=5):
    """The whole: router, layer, shared experts and their gate."""
    torch.manual_seed(seed)
    return TopKGate(factor=2.5), make_layer(), Mlp(), torch.nn.Linear(32, 1)


def check(rank):
    """Everything that one rank checks."""
    gate, layer, shared, shared_gate = parts_of()
    x = make_input(9)
    want = SharedExpertMoEBlock(gate, layer, shared, shared_gate)(x)
    for slice_of, group in ((expert_slice, "ep_group"), (width_slice, "tp_group")):
        part = slice_of(layer, rank, RANKS, **{group: dist.group.WORLD})
        for replicated in (True, False):
            mine = shared if replicated else sharded_mlp(shared, rank, RANKS)
            for reduce_results in (True, False):
                block = SharedExpertMoEBlock(
                    gate,
                    part,
                    mine,
                    shared_gate,
                    shared_is_replicated=replicated,
                    reduce_results=reduce_results,
                )
                for defer in (None, True, False):
                    out = block(x, defer=defer)
                    if not reduce_results:
                        dist.all_reduce(out)
                    # float32, parts summed in another order
                    torch.testing.assert_close(out, want, rtol=2e-5, atol=2e-5)
                late, refusals = replicated and reduce_results, str(block.last_plan.refusals)
                assert ("placement: no, replicated" in refusals) == late
                idle = replicated and not reduce_results and rank > 0
                assert ("added on the first rank" in refusals) == idle
                assert torch.equal(copy.deepcopy(block)(x[:0]), x[:0])
    check_layer(layer, x, gate(x), rank)


def check_layer(layer, x, topk, rank):
    """The layer alone: who reduces, and what cannot be."""
    want = layer(x, topk)
    part = expert_slice(layer, rank, RANKS, ep_group=dist.group.WORLD, reduce_results=True)
    torch.testing.assert_close(part(x, topk), want, rtol=2e-5, atol=2e-5)
    late = part.reduce(part.forward_deferred_finalize(x, topk).finalize())
    torch.testing.assert_close(late, want, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="experts: expected reduce_results=False"):
        SharedExpertMoEBlock(torch.nn.Identity(), part)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=r"all_reduce has no gradient here; pass reduce_re"):
            part(leaf, topk)
        assert part(leaf, topk, defer=True).finalize().requires_grad
    with pytest.raises(TypeError, match="process groups cannot be pickled"):
        pickle.dumps(part)
    assert copy.deepcopy(part).groups is part.groups
    assert "ep 2" in str(part.explain())


def run(rank, store):
    """Entry of one process."""
    with joined(rank, store, RANKS):
        check(rank)
