# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients through a fused model equal the stock model's."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.integrations import transformers as integration

from .tiny_models import (
    BLOCK_ROUNDINGS,
    HIDDEN,
    LOGIT_ROUNDINGS,
    SHARED_FAMILIES,
    assert_close,
    build,
    moe_blocks,
    tokens,
)

WHO = {
    "x": lambda name: False,
    "router": lambda name: name.startswith("gate."),
    "experts": lambda name: name.startswith("experts."),
    "shared": lambda name: name.startswith("shared_expert"),
    "all": lambda name: True,
}
TOKENS = 2 * 7


def _gradients(block, x, who):
    x = x.clone().requires_grad_(who in ("x", "all"))
    for name, parameter in block.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(WHO[who](name))
    out = block(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    named = {name: p.grad for name, p in block.named_parameters() if p.requires_grad}
    return out.detach(), {"x": x.grad, **named} if x.requires_grad else named


@pytest.mark.field_report("A17")
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_block_gradients_equal_stock(family, who):
    block = list(moe_blocks(build(family)).values())[-1]
    x = torch.randn(2, 7, HIDDEN)
    out, stock = _gradients(block, x, who)
    assert stock
    assert integration.fuse_shared_experts(block).fused == ("",)
    fused_out, fused = _gradients(block, x, who)
    assert_close(fused_out, out, BLOCK_ROUNDINGS, "output")
    assert fused.keys() == stock.keys()
    for name, gradient in stock.items():
        assert gradient is not None and gradient.any(), name
        # a weight's gradient sums over tokens; the way back is as long as the way there
        assert_close(fused[name], gradient, 2 * BLOCK_ROUNDINGS + TOKENS, name)


@pytest.mark.field_report("A17")
@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_model_gradients_equal_stock(family):
    ids, gradients = tokens(), []
    for fuse in (False, True):
        model = build(family).train()
        if fuse:
            assert integration.fuse_shared_experts(model).fused
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        if expected is None:
            assert gradients[1][name] is None, name
        else:
            assert_close(gradients[1][name], expected, 3 * LOGIT_ROUNDINGS, name)


@pytest.mark.field_report("A17")
@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_train_mode_no_grad_and_inference_mode_change_no_bit(family):
    block = list(moe_blocks(build(family)).values())[-1]
    integration.fuse_shared_experts(block)
    x = torch.randn(2, 7, HIDDEN)
    expected = block(x).detach()
    assert torch.equal(block.train()(x).detach(), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = block(x)
        assert not got.requires_grad
        assert torch.equal(got, expected)
