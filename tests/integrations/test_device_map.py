# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused blocks behind accelerate's hooks: those that place a module, and those that offload it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse
from sgl_moe_jit.integrations.transformers import unfuse_shared_experts as unfuse

from .tiny_models import (
    BLOCK_ROUNDINGS,
    FUSED_FAMILIES,
    HIDDEN,
    LOGIT_ROUNDINGS,
    assert_close,
    build,
    last_block,
    moe_blocks,
    tokens,
)


class AlignDevicesHook:
    """What accelerate's hook of that name does here: a weight is there while its module runs."""

    io_same_device = False

    def __init__(self, offload):
        self.offload, self.kept = offload, {}

    def put_away(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            self.kept[name] = parameter.data
            module.register_parameter(name, torch.nn.Parameter(parameter.data.to("meta")))

    def call(self, module, *args, **kwargs):
        for name, data in self.kept.items():
            module.register_parameter(name, torch.nn.Parameter(data))
        output = module._old_forward(*args, **kwargs)
        if self.offload:
            self.put_away(module)
        return output


def attach(model, offload=False, kind=AlignDevicesHook):
    """Hook every module, as accelerate does: a ``forward`` on the instance around the old one."""
    for module in model.modules():
        hook = kind(offload)
        module._old_forward, module._hf_hook = module.forward, hook
        if offload:
            hook.put_away(module)
        module.forward = functools.partial(hook.call, module)


def dispatch_by_accelerate(model, offload=False):
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    if offload:
        big_modeling.cpu_offload(model, execution_device="cpu")
    else:
        big_modeling.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)


@pytest.mark.parametrize("hook", [attach, dispatch_by_accelerate])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_moe"])
@torch.no_grad()
def test_a_placed_model_is_fused_and_unfused(family, when, offload, hook):
    model, ids = build(family), tokens()
    stock = model(ids).logits
    classes = [type(m) for m in model.modules()]
    if when == "before":
        hook(model, offload)
    report = fuse(model)
    assert report.fused and not report.skipped
    if when == "after":
        hook(model, offload)
    assert_close(model(ids).logits, stock, LOGIT_ROUNDINGS, f"{family}, hooks {when}")
    plans = [block.last_plan for block in moe_blocks(model).values()]
    for plan in plans:
        assert plan.deferred is (family != "qwen3_moe" and not offload)
        assert any("an offloading hook" in why for why in plan.refusals) is offload
    assert unfuse(model) == report.fused
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
@torch.no_grad()
def test_a_copy_of_a_placed_block_computes_with_its_own_weights(family):
    block, x = last_block(family), torch.randn(1, 5, HIDDEN)
    attach(block)
    fuse(block)
    out, twin = block(x), copy.deepcopy(block)
    for parameter in block.parameters():
        parameter.zero_()
    assert torch.equal(twin(x), out)
    assert unfuse(twin) == ("",)


@torch.no_grad()
def test_a_hook_of_another_kind_gets_a_tensor():
    seen = []

    class Looking(AlignDevicesHook):
        def call(self, module, *args, **kwargs):
            output = super().call(module, *args, **kwargs)
            seen.append(type(output))
            return output

    block, x = last_block("deepseek_v3"), torch.randn(1, 5, HIDDEN)
    stock = block(x)
    attach(block.experts, kind=Looking)
    fuse(block)
    assert_close(block(x), stock, BLOCK_ROUNDINGS, "looked at")
    assert torch.Tensor in seen and len(set(seen)) == 1
    assert "experts: no, accelerate's Looking stands around them" in block.last_plan.refusals


def test_what_a_removed_hook_leaves_behind_is_named():
    """accelerate sets ``module.forward`` to the bound method it found, so the instance has one."""
    block = last_block("deepseek_v3")
    fuse(block)
    attach(block)
    block.forward = block._old_forward
    del block._old_forward, block._hf_hook
    with pytest.raises(UnsupportedError, match=r"got SharedExpertMoEBlock\.forward, .*del block"):
        unfuse(block)
    del block.forward
    assert unfuse(block) == ("",)
