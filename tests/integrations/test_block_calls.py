# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A fused block's call: hooks, adapters, the shared expert's gate, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch

from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse

from .tiny_models import (
    BLOCK_ROUNDINGS,
    HIDDEN,
    SHARED_FAMILIES,
    assert_close,
    last_block,
    let_runners_overwrite,
)


@pytest.mark.field_report("A21")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", SHARED_FAMILIES)
@torch.no_grad()
def test_user_hooks_fire_with_the_stock_values(family, when, deferred):
    x, seen = torch.randn(2, 3, HIDDEN), []

    def hook(block):
        for name, child in block.named_children():
            child.register_forward_hook(lambda m, args, out, name=name: seen.append((name, out)))

    block = last_block(family)
    hook(block)
    block(x)
    stock = dict(seen)
    seen.clear()
    block = last_block(family)
    if when == "before":
        hook(block)
    fuse(block)
    if when == "after":
        block(x)
        assert deferred == [True]
        hook(block)
    block(x)
    assert deferred[-1] is False  # the hook on the experts was promised a tensor
    got = dict(seen)
    assert got.keys() == stock.keys() and len(seen) == len(got)
    for name, expected in stock.items():
        mine, theirs = (o if isinstance(o, tuple) else (o,) for o in (got[name], expected))
        for a, b in zip(mine, theirs, strict=True):
            assert_close(a, b, BLOCK_ROUNDINGS, name)


@pytest.mark.field_report("A21")
@torch.no_grad()
def test_a_wrapped_shared_expert_or_gate_takes_effect():
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.extra = base, torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x):
            return self.base(x) + self.extra

    x = torch.randn(2, 3, HIDDEN)
    stock = last_block("qwen2_moe")
    stock.shared_expert = Adapter(stock.shared_expert)
    stock.shared_expert_gate = Adapter(stock.shared_expert_gate)
    fused = copy.deepcopy(stock)
    assert fuse(fused).fused
    assert_close(fused(x), stock(x), BLOCK_ROUNDINGS, "adapters")


@pytest.mark.field_report("A26")
@torch.no_grad()
def test_shared_gate_of_zero_weight_counts_half_and_no_gate_counts_one():
    x = torch.randn(2, 3, HIDDEN)
    block = last_block("qwen2_moe")
    fuse(block)
    block.experts.down_proj.zero_()
    block.shared_expert_gate.weight.zero_()
    shared = block.shared_expert(x.view(-1, HIDDEN)).view(x.shape)
    assert torch.equal(block(x), 0.5 * shared)
    block = last_block("deepseek_v3")
    fuse(block)
    block.experts.down_proj.zero_()
    assert torch.equal(block(x), block.shared_experts(x))


@pytest.mark.field_report("A26")
@torch.no_grad()
def test_shared_gate_sees_the_original_input(monkeypatch):
    block, x = last_block("qwen2_moe"), torch.randn(2, 3, HIDDEN)
    stock, before = block(x), x.clone()
    fuse(block)
    inputs = let_runners_overwrite(monkeypatch)
    for defer in (True, False):
        assert_close(block(x, defer=defer), stock, BLOCK_ROUNDINGS, f"gated block, {defer=}")
    assert torch.equal(x, before) and len(inputs) == 2 and inputs[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@torch.no_grad()
def test_dtype_and_shape_are_the_stock_blocks(family, autocast, dtype):
    block, x = last_block(family).to(dtype), torch.randn(3, 1, HIDDEN).to(dtype)
    oracle = copy.deepcopy(block).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stock = block(x)
        fuse(block)
        got = block(x)
    assert (got.dtype, got.shape) == (stock.dtype, stock.shape)
    # The same roundings as the stock block or fewer: its error plus one rounding of the output.
    step = torch.finfo(torch.bfloat16 if autocast else dtype).eps
    allowed = 2 * (stock - oracle).abs().max() + step * oracle.abs().max()
    assert (got - oracle).abs().max() <= allowed
