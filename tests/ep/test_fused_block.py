# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers blocks as fused slices on simulated ranks: the sum is the unfused block's."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from sgl_moe_jit import FusedMoE, SharedExpertMoEBlock
from sgl_moe_jit.ep import (
    EpLayout,
    fused_shared_expert_weight,
    logical_to_physical_table,
    to_physical,
)
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers import load_block
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.integrations.tiny_models import (
    _COMMON,
    BLOCK_ROUNDINGS,
    EXPERTS,
    FAMILIES,
    HIDDEN,
    TOP_K,
    WIDTH,
    assert_close,
    last_block,
    moe_blocks,
)

FACTOR = 2.5  # of these models; their routers' weights hold it
CLASSES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe"}
field_report = pytest.mark.field_report


def stock_block(family, num_shared=1):
    settings = dict(FAMILIES["glm4_moe" if family == "glm4_moe" else "deepseek_v3"][1])
    settings["n_shared_experts"] = num_shared
    if family == "deepseek_v2":
        settings |= {"topk_method": "group_limited_greedy"}
    name = CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**_COMMON, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation("eager")  # which does float64 too
    return list(moe_blocks(model).values())[-1]


def expanded(layout, ids, weights, shared_weight, table=None):
    """Dispatch ids and weights in plain Python; token t's shared experts are on rank t mod W."""
    out_ids, out_weights = [], []
    for t, (row, given) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        physical = row if table is None else [table[e][t % len(table[e])] for e in row]
        local, block = layout.num_local_routed, layout.num_local
        line = [e // local * block + e % local for e in physical]
        home = t % layout.ep_size * block + local
        out_ids.append(line + [home + s for s in range(layout.num_shared)])
        out_weights.append(given + [shared_weight] * layout.num_shared)
    return torch.tensor(out_ids), torch.tensor(out_weights, dtype=weights.dtype)


def counted(block):
    calls = []
    block.shared_experts.register_forward_pre_hook(lambda *args: calls.append(1))
    return calls


@field_report("E8")
@pytest.mark.parametrize("family", list(CLASSES))
@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
@torch.no_grad()
def test_the_ranks_sum_up_to_the_unfused_block(family, num_shared, ep_size):
    stock, x = stock_block(family, num_shared), torch.randn(9, HIDDEN)
    want = copy.deepcopy(stock).double()(x.double()[None])[0]
    layout = EpLayout(EXPERTS, 0, ep_size, num_shared)
    ranks = [FusedMoE.from_transformers(stock, rank, ep_size) for rank in range(ep_size)]
    calls = counted(stock)

    def gate(hidden_states):
        _, weights, ids = stock.gate(hidden_states)
        return StandardTopKOutput(*reversed(expanded(layout, ids, weights, 1.0)))

    total = torch.zeros_like(want)
    for rank, experts in enumerate(ranks):
        assert experts.num_local_experts == layout.num_local
        assert experts.num_fused_shared_experts == num_shared
        topk = gate(x)
        local = StandardTopKOutput(topk.topk_weights, layout.local_id(topk.topk_ids, rank))
        part = experts(x, local)
        # The same through a block, whose router gives ids of all ranks' slots.
        block = SharedExpertMoEBlock(
            gate,
            FusedMoE.from_transformers(
                stock_block(family, num_shared),
                rank,
                ep_size,
                expert_range=(rank * layout.num_local, layout.num_local),
            ),
            stock.shared_experts,
            shared_is_fused=True,
        )
        assert torch.equal(block(x), part)
        total += part
    assert calls == []  # the separate MLP never ran
    roundings = BLOCK_ROUNDINGS + num_shared * WIDTH + ep_size
    assert_close(total.float(), want.float(), roundings, family)
    assert stock(x[None]).shape == (1, 9, HIDDEN) and calls == [1]  # the count counts


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_a_factor_that_comes_later_leaves_the_shared_experts_alone(family):
    stock, x = stock_block(family), torch.randn(9, HIDDEN)
    want = copy.deepcopy(stock).double()(x.double()[None])[0]
    layout, total = EpLayout(EXPERTS, 0, 2, 1), torch.zeros_like(want)
    _, weights, ids = stock.gate(x)
    shared_weight = fused_shared_expert_weight(FACTOR, False)
    out_ids, out_weights = expanded(layout, ids, weights / FACTOR, shared_weight)
    for rank in range(2):
        experts = FusedMoE.from_transformers(stock, rank, 2)
        local = layout.local_id(out_ids, rank)
        total += experts(x, StandardTopKOutput(out_weights, local, FACTOR))
    assert_close(total.float(), want.float(), BLOCK_ROUNDINGS + 4, family)


@pytest.mark.gpu
@torch.no_grad()
def test_slices_on_a_gpu():
    stock, x = stock_block("deepseek_v3", 2), torch.randn(9, HIDDEN)
    want = copy.deepcopy(stock).double()(x.double()[None])[0]
    stock, layout, total = stock.cuda(), EpLayout(EXPERTS, 0, 2, 2), torch.zeros_like(want)
    _, weights, ids = stock.gate(x.cuda())
    out_ids, out_weights = (y.cuda() for y in expanded(layout, ids, weights, 1.0))
    for rank in range(2):
        experts = FusedMoE.from_transformers(stock, rank, 2)
        assert experts.gate_up_proj.is_cuda
        local = layout.local_id(out_ids, rank)
        total += experts(x.cuda(), StandardTopKOutput(out_weights, local)).cpu()
    assert_close(total.float(), want.float(), BLOCK_ROUNDINGS + 2 * WIDTH + 2, "on a GPU")


@field_report("E2")
@pytest.mark.parametrize("table", [None, [7, 0, 3, 3, 1, 2, 6, 5, 4]])
@torch.no_grad()
def test_replicas_on_three_ranks(table):
    stock, x = stock_block("deepseek_v3"), torch.randn(9, HIDDEN)
    want = copy.deepcopy(stock).double()(x.double()[None])[0]
    layout, total = EpLayout(EXPERTS, 1, 3, 1), torch.zeros_like(want)
    places = [[] for _ in range(EXPERTS)]
    for slot, expert in enumerate(table or [*range(EXPERTS), 0]):
        places[expert].append(slot)
    _, weights, ids = stock.gate(x)
    out_ids, out_weights = expanded(layout, ids, weights, 1.0, places)
    physical = to_physical(ids, logical_to_physical_table(layout, table))
    assert torch.equal(layout.to_dispatch(physical), out_ids[:, :TOP_K])
    for rank in range(3):
        experts = FusedMoE.from_transformers(
            stock, rank, 3, num_redundant=1, physical_to_logical=table
        )
        local = layout.local_id(out_ids, rank)
        total += experts(x, StandardTopKOutput(out_weights, local))
    assert_close(total.float(), want.float(), BLOCK_ROUNDINGS + 5, "replicas")


@torch.no_grad()
def test_without_fusion_the_slice_is_routed_alone():
    for family in ("deepseek_v3", "qwen2_moe", "qwen3_moe"):
        stock, x = last_block(family), torch.randn(6, HIDDEN)
        experts = FusedMoE.from_transformers(stock, 1, 2, fuse_shared=False)
        assert (experts.num_local_experts, experts.num_fused_shared_experts) == (4, 0)
        whole = load_block(stock).experts
        _, weights, ids = stock.gate(x)
        theirs = torch.where(ids >= 4, ids, -1)
        want = whole(x, StandardTopKOutput(weights, theirs))
        got = experts(x, StandardTopKOutput(weights, torch.where(ids >= 4, ids - 4, -1)))
        assert torch.equal(got, want)


def test_the_block_is_only_read():
    stock = stock_block("deepseek_v3", 2)
    before = {name: p.clone() for name, p in stock.named_parameters()}
    experts = FusedMoE.from_transformers(stock, 0, 2)
    for p in experts.parameters():
        assert not p.requires_grad
        p.data.fill_(float("nan"))
    assert all(torch.equal(p, before[name]) for name, p in stock.named_parameters())


def changed(change, family="deepseek_v3"):
    def make():
        block = stock_block(family) if family in CLASSES else last_block(family)
        change(block)
        return block

    return make


def other_gate(block):
    block.experts._apply_gate = lambda x: x[..., :WIDTH] * x[..., WIDTH:]


class Adapter(torch.nn.Linear):
    """What an adapter library puts in a Linear's place."""


def narrow(block):
    for name in ("gate_proj", "up_proj"):
        setattr(block.shared_experts, name, torch.nn.Linear(HIDDEN, 48, bias=False))
    block.shared_experts.down_proj = torch.nn.Linear(48, HIDDEN, bias=False)


def with_bias(block):
    block.shared_experts.up_proj = torch.nn.Linear(HIDDEN, WIDTH)


def with_adapter(block):
    block.shared_experts.up_proj = Adapter(HIDDEN, WIDTH, bias=False)


def other_mlp(block):
    block.shared_experts = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN))


def twice(block):
    cls = type(block.shared_experts)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)

    block.shared_experts.__class__ = type(cls.__name__, (cls,), {"forward": forward})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (changed(lambda b: None, "qwen2_moe"), "shared_expert_gate: expected .* without a gate"),
        (changed(lambda b: None, "qwen3_moe"), "expected shared experts, got a block without"),
        (changed(narrow), "multiple of the routed experts' 32, got 48; pass fuse_shared=False"),
        (
            changed(lambda b: b.shared_experts.to(torch.bfloat16)),
            "expected torch.float32 on cpu like the routed experts, got torch.bfloat16",
        ),
        (changed(with_bias), "up_proj: expected a plain torch.nn.Linear .*got a bias"),
        (changed(with_adapter), "up_proj: expected a plain .*Adapter; merge adapters first"),
        (changed(other_mlp), r"Sequential.forward: expected down_proj\(act_fn"),
        (changed(twice), r"MLP.forward: expected down_proj\(act_fn"),
        (
            changed(lambda b: setattr(b.shared_experts, "act_fn", torch.nn.GELU())),
            "act_fn: expected SiLU without hooks, got GELU",
        ),
        (
            changed(lambda b: b.register_forward_hook(lambda *a: None)),
            "DeepseekV3MoE: expected no hooks, which would be lost",
        ),
        (
            changed(lambda b: b.shared_experts.register_forward_hook(lambda *a: None)),
            "MLP: expected no hooks, which would be lost",
        ),
        (
            changed(lambda b: b.shared_experts.up_proj.register_forward_hook(lambda *a: None)),
            "Linear: expected no hooks, which would be lost",
        ),
        (changed(other_gate), "DeepseekV3MoE: shared experts: expected routed .* are SwiGLU MLPs"),
        (changed(lambda b: None, "mixtral"), "block: expected one of"),
    ],
)
def test_what_cannot_be_fused_is_refused_with_the_reason(make, why):
    with pytest.raises(UnsupportedError, match=why):
        FusedMoE.from_transformers(make(), 0, 2)


def test_ranks_that_do_not_divide_the_experts_are_refused():
    stock = stock_block("deepseek_v3")
    with pytest.raises(ValueError, match="ep_size: expected a divisor of the 8"):
        FusedMoE.from_transformers(stock, 0, 3)
    with pytest.raises(ValueError, match="ep_rank: expected 0 <= ep_rank < ep_size, 2, got 2"):
        FusedMoE.from_transformers(stock, 2, 2)
