# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' own routers through the routing kernel, beside what they choose themselves."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.integrations.transformers import fuse_shared_experts, load_block
from sgl_moe_jit.integrations.transformers.gate_table import style_of_gate
from sgl_moe_jit.integrations.transformers.stock_gates import read_gate
from sgl_moe_jit.moe.topk_selection import apply_scores

from .test_stock_gates import TAKEN
from .tiny_models import (
    ALL_FUSED_FAMILIES,
    HIDDEN,
    LOGIT_ROUNDINGS,
    assert_close,
    build,
    last_block,
    moe_blocks,
    recorded_router_logits,
    tokens,
)

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def wide_gate(family, experts=256, top_k=8):
    """A router with as many experts as the published models have."""
    gate = last_block(family).gate
    gate.weight.data = torch.randn(experts, HIDDEN) * HIDDEN**-0.5
    gate.num_experts, gate.top_k = experts, top_k
    if hasattr(gate, "num_group"):
        gate.num_group, gate.topk_group = 8, 4
    if hasattr(gate, "e_score_correction_bias"):
        gate.e_score_correction_bias = torch.randn(experts) * 0.1
    return gate.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@torch.no_grad()
def test_the_same_experts_and_weights(family, dtype):
    """Sets of ids equal but for ties, and weights by id."""
    gate = wide_gate(family)
    gate.weight.data = gate.weight.data.to(dtype)
    x = torch.randn(4, 1000, HIDDEN, device="cuda").to(dtype)
    logits, weights, ids = gate(x)
    got, text = read_gate.route(gate, x)
    assert text.endswith(TAKEN)
    assert got.topk_weights.dtype == weights.dtype and got.topk_ids.dtype == torch.int32
    style = style_of_gate(type(gate), type(gate).forward)
    assert torch.equal(style.logits(gate, x), logits)
    mine, theirs = got.topk_ids.long().sort(-1), ids.sort(-1)
    same = (mine.values == theirs.values).all(-1)
    tolerance = 2.0**-7 if weights.dtype == BF16 else (8 + 32 + 2 * 8) * 2.0**-24
    torch.testing.assert_close(
        got.topk_weights.gather(-1, mine.indices)[same],
        weights.gather(-1, theirs.indices)[same],
        rtol=tolerance,
        atol=0,
    )
    routing = style.routing(gate, gate.num_experts)
    choice, bias = apply_scores(logits, routing), style.bias(gate)
    choice = choice if bias is None else choice + bias
    for row in (~same).nonzero().flatten().tolist():
        swapped = set(mine.values[row].tolist()) ^ set(theirs.values[row].tolist())
        values = choice[row, list(swapped)]
        assert float(values.max() - values.min()) <= 4 * 2.0**-23 * float(values.max().abs())
    # float32 logits almost never tie; one in four rows of bfloat16 ones does at its eighth place.
    assert float(same.float().mean()) > (0.999 if logits.dtype == torch.float32 else 0.5)


@pytest.mark.parametrize("ours", ["loaded", "fused"])
@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@torch.no_grad()
def test_a_captured_block_routes_by_the_kernel(family, ours):
    block = last_block(family).cuda().bfloat16()
    if ours == "loaded":
        block = load_block(block)
    else:
        fuse_shared_experts(block)
    x = torch.randn(1, 9, HIDDEN, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert block(x).isfinite().all()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = block(x)
    assert f"{type(block.gate).__name__}: {TAKEN}" in str(block.explain())
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        # two orders of equal terms, in bfloat16
        want = block(x)
        assert float((y.float() - want.float()).norm()) <= 2.0**-7 * float(want.float().norm())


@torch.no_grad()
def test_autocast_keeps_the_stock_router():
    block = load_block(last_block("deepseek_v3").cuda())
    x = torch.randn(1, 5, HIDDEN, device="cuda")
    with torch.autocast("cuda", BF16):
        block(x)
    assert "called as a module, autocast is on" in str(block.explain())


def test_gradients_go_through_the_stock_router():
    block = load_block(last_block("deepseek_v3").cuda().bfloat16())
    block(torch.randn(1, 5, HIDDEN, device="cuda", dtype=BF16)).float().sum().backward()
    assert block.gate.weight.grad is not None
    assert "called as a module, gradients" in str(block.explain())


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_moe"])
@torch.no_grad()
def test_a_fused_model_beside_the_stock_model(family):
    model, ids = build(family).cuda(), tokens().cuda()
    want = model(ids).logits
    want_router = recorded_router_logits(build(family).cuda(), ids)
    fuse_shared_experts(model)
    assert_close(model(ids).logits, want, 2 * LOGIT_ROUNDINGS, family)
    assert all(TAKEN in str(block.explain()) for block in moe_blocks(model).values())
    got = model(ids, output_router_logits=True).router_logits
    assert len(got) == len(want_router) == len(moe_blocks(model))
    for mine, theirs in zip(got, want_router, strict=True):
        assert_close(mine, theirs, 2 * LOGIT_ROUNDINGS, family)
