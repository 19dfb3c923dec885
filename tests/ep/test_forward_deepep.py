# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``SharedExpertMoEBlock.forward_deepep`` over ranks, against the whole layer in float64."""

import pytest
import torch

from sgl_moe_jit.ep.dispatch import TorchDispatcher
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
    home_expand,
    random,
)
from tests.ep.thread_ranks import all_ranks

field_report = pytest.mark.field_report
MODES = {
    "source": {"sum_at": "source"},
    "experts": {"sum_at": "experts"},
    "fixed": {"sum_at": "experts", "max_tokens_per_rank": 7},
}
LAYOUTS = [
    pytest.param(EpLayout(8, ep_size=2), id="2-ranks"),
    pytest.param(EpLayout(9, ep_size=3), id="3-ranks"),
    pytest.param(EpLayout(8, ep_size=4, num_shared=2), id="4-ranks-2-shared"),
    pytest.param(EpLayout(4, ep_size=1), id="1-rank"),
]


def tokens_of(rank):
    return (5, 0, 7, 3)[rank]


def rank_input(rank, layout, absent=0.0):
    x = random(20 + rank, tokens_of(rank), H) * H**0.5
    ids, weights = choose(rank, tokens_of(rank), layout.num_experts, 3, absent)
    return x, ids, weights


def make_block(whole, layout, group, gate, *, fused=True, **options):
    if not fused:
        layout = EpLayout(layout.num_experts, layout.num_redundant, layout.ep_size, 0)
    mlp = SharedMlp(whole)
    experts = whole.fused(layout, group.rank(), **options)
    return SharedExpertMoEBlock(gate, experts, mlp, shared_is_fused=fused), mlp, layout


@field_report("E4")
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_and_separate_equal_the_whole(monkeypatch, layout, mode, factor, dtype):
    whole = Whole.make(layout.num_experts, layout.num_shared, dtype)

    def call(group):
        rank = group.rank()
        x, ids, weights = rank_input(rank, layout)
        outputs = []
        for fused in (True, False):
            gate = FixedGate(ids, weights, factor)
            block, mlp, here = make_block(whole, layout, group, gate, fused=fused)
            path = ExpertParallelPath(
                TorchDispatcher(group, here.num_local, **MODES[mode]),
                home_expand(layout, rank) if fused else None,
            )
            outputs.append(block.forward_deepep(x.to(dtype)[None], path)[0])
            assert mlp.calls == (0 if fused or not len(x) else 1)
        return (x.to(dtype), ids, weights), outputs

    done, _ = all_ranks(monkeypatch, layout.ep_size, call)
    for (x, ids, weights), outputs in done:
        for output in outputs:
            assert output.dtype == dtype
            check_output(output, whole, x, ids, weights, factor)


@field_report("E5")
@pytest.mark.parametrize("mode", MODES)
def test_any_rank_may_compute_a_tokens_shared_expert(monkeypatch, mode):
    """What a balancer does: every token's shared column names some rank's slot, its own or not."""
    layout = EpLayout(9, ep_size=3)
    whole = Whole.make(9)

    def call(group):
        rank = group.rank()
        x, ids, weights = rank_input(rank, layout)
        home = home_expand(layout, rank)

        def spread(*arguments):
            ids, weights = home(*arguments)
            for t in range(len(ids)):
                ids[t, -1] = layout.shared_id((rank + t) % 3)
            return ids, weights

        block, mlp, _ = make_block(whole, layout, group, FixedGate(ids, weights))
        dispatcher = TorchDispatcher(group, layout.num_local, **MODES[mode])
        output = block.forward_deepep(x, ExpertParallelPath(dispatcher, spread))
        assert mlp.calls == 0
        return x, ids, weights, output

    for x, ids, weights, output in all_ranks(monkeypatch, 3, call)[0]:
        check_output(output, whole, x, ids, weights)


@field_report("E1")
@field_report("E2")
@field_report("E3")
@pytest.mark.parametrize("count", [4, torch.tensor(4), torch.tensor([4], dtype=torch.int32)])
def test_replicas_padding_and_the_recorder(monkeypatch, count):
    """Logical ids through the table, then the mask, then the recorder, then the shared columns.

    Two replicas on 2 ranks: 6 logical experts in 8 slots. The table has one entry a logical expert,
    so that a shared id or a -1 read from it would show: its last entry is a slot nobody chose.
    """
    layout = EpLayout(6, 2, ep_size=2)
    to_logical = torch.tensor([0, 1, 2, 3, 4, 0, 1, 5])
    table = torch.tensor([5, 6, 2, 3, 4, 7])
    whole = Whole.make(6)
    seen = {}

    def call(group):
        rank = group.rank()
        x = random(30 + rank, 6, H) * H**0.5
        ids, weights = choose(40 + rank, 6, 5, 3, absent=0.2)
        ids[3] = -1
        block, mlp, _ = make_block(
            whole, layout, group, FixedGate(ids, weights), to_logical=to_logical
        )
        looked_up = []

        def to_physical(logical):
            looked_up.append(logical)
            return table[logical.long()]

        path = ExpertParallelPath(
            TorchDispatcher(group, layout.num_local),
            home_expand(layout, rank),
            to_physical,
            lambda physical: seen.setdefault(rank, physical.clone()),
        )
        output = block.forward_deepep(x, path, num_token_non_padded=count)
        assert mlp.calls == 0
        assert all(int(logical.min()) >= 0 and int(logical.max()) < 6 for logical in looked_up)
        return x, ids, weights, output

    for rank, (x, ids, weights, output) in enumerate(all_ranks(monkeypatch, 2, call)[0]):
        live = ids.clone()
        live[4:] = -1
        want = torch.where(live < 0, live.long(), table[live.clamp(min=0).long()])
        assert seen[rank].shape == (6, 3) and torch.equal(seen[rank].long(), want)
        check_output(output, whole, x, live, weights)
        assert torch.equal(output[3:], torch.zeros(3, H))


@field_report("E8")
def test_the_router_of_a_block_serves_too(monkeypatch):
    """Gate and router inside the block, and a layer that counts its experts from its own first."""
    from sgl_moe_jit.moe.layer import FusedMoE

    layout = EpLayout(8, ep_size=2)
    whole = Whole.make(8)
    logits = random(50, 8, H)

    def gate(x):
        weights, ids = torch.softmax(x @ logits.t(), -1).topk(2)
        return FixedGate(ids, weights, 1.5).output

    def call(group):
        rank = group.rank()
        x = random(60 + rank, 5, H) * H**0.5
        plain = whole.fused(layout, rank)
        placed = FusedMoE.from_w13_w2(
            *(p.detach() for p in plain.parameters()), expert_range=(rank * 5, 5)
        )
        path = ExpertParallelPath(TorchDispatcher(group, 5), home_expand(layout, rank))
        outputs = [
            SharedExpertMoEBlock(gate, experts, shared_is_fused=True).forward_deepep(x, path)
            for experts in (plain, placed)
        ]
        return x, outputs

    for x, (plain, placed) in all_ranks(monkeypatch, 2, call)[0]:
        choice = gate(x)
        check_output(plain, whole, x, choice.topk_ids, choice.topk_weights, 1.5)
        assert torch.equal(plain, placed)
