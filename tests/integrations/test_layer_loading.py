# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks loaded from transformers models: same values, same storage."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

from sgl_moe_jit.integrations.transformers.layer_loading import load_block, load_experts
from sgl_moe_jit.moe.topk import StandardTopKOutput

from .tiny_models import (
    _COMMON,
    _DEEPSEEK,
    BLOCK_ROUNDINGS,
    EXPERTS,
    HIDDEN,
    LOGIT_ROUNDINGS,
    TOP_K,
    WIDTH,
    assert_close,
    build,
    last_block,
    moe_blocks,
    tokens,
)

FAMILIES = ["deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_moe"]


def deepseek_v2_block():
    """The last block of a tiny DeepSeek-V2: softmax, groups by their best expert, no bias."""
    settings = {
        **_COMMON,
        **_DEEPSEEK,
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
        **{"v_head_dim": 16, "topk_method": "group_limited_greedy", "topk_group": 1},
    }
    torch.manual_seed(0)
    model = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**settings)).eval()
    return list(moe_blocks(model).values())[-1]


def kimi_k2_block():
    """Kimi-K2 has DeepSeek-V3's class: one group, another factor."""
    model = build("deepseek_v3")
    config = model.config
    config.n_group = config.topk_group = 1
    config.routed_scaling_factor = 2.827
    torch.manual_seed(0)
    return type(list(moe_blocks(model).values())[-1])(config).eval()


def stock_block(family):
    if family == "deepseek_v2":
        return deepseek_v2_block()
    if family == "kimi_k2":
        block = kimi_k2_block()
        with torch.no_grad():
            for p in block.parameters():
                p.normal_(0, 0.2)
        return block
    return last_block(family)


ALL = [*FAMILIES, "deepseek_v2", "kimi_k2"]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("defer", [None, True, False])
@torch.no_grad()
def test_a_loaded_block_computes_what_the_stock_block_does(family, defer):
    stock, x = stock_block(family), torch.randn(2, 7, HIDDEN)
    want = stock(x)
    block = load_block(stock)
    assert_close(block(x, defer=defer), want, BLOCK_ROUNDINGS, family)
    assert block.last_plan.deferred is (family != "qwen3_moe" and defer is not False)
    assert torch.equal(stock(x), want)  # which is still there, on the same parameters


@pytest.mark.parametrize("family", ALL)
def test_parameters_are_the_same_objects(family):
    stock = stock_block(family)
    block = load_block(stock)
    assert {id(p) for p in block.parameters()} == {id(p) for p in stock.parameters()}
    assert {id(b) for b in block.buffers()} == {id(b) for b in stock.buffers()}
    assert block.gate is stock.gate
    names = ["gate_up_proj", "down_proj"]
    assert [n for n, _ in block.experts.named_parameters()] == names
    if family not in ("qwen2_moe",):  # which calls it shared_expert
        block.load_state_dict(stock.state_dict(), strict=True)
    assert block.training is stock.training
    assert "grouped_mm" in str(block.explain())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_model_of_loaded_blocks(family):
    model, ids = build(family), tokens()
    want = model(ids).logits
    for name, block in moe_blocks(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, load_block(block))
    assert_close(model(ids).logits, want, LOGIT_ROUNDINGS, family)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin(ids).logits, model(ids).logits)
    generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 10)


@pytest.mark.field_report("A21")
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("called_before", [True, False])
@torch.no_grad()
def test_router_logits_are_still_collected(family, called_before):
    model, ids = build(family), tokens()
    if called_before:
        model(ids, output_router_logits=True)
    want = build(family)(ids, output_router_logits=True, labels=ids)
    for name, block in moe_blocks(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, load_block(block))
    got = model(ids, output_router_logits=True, labels=ids)
    assert len(got.router_logits) == len(want.router_logits) == 2
    for mine, theirs in zip(got.router_logits, want.router_logits, strict=True):
        assert_close(mine, theirs, LOGIT_ROUNDINGS, family)
    assert abs(got.aux_loss - want.aux_loss) <= 1e-5 * abs(want.aux_loss)


@pytest.mark.field_report("A17")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_stock_blocks(family):
    stock, x = stock_block(family), torch.randn(2, 7, HIDDEN)
    gradients = []
    for block in (stock, load_block(stock)):
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        out = block(leaf)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        named = {id(p): p.grad for p in block.parameters()}
        gradients.append({**named, "x": leaf.grad})
    for name, expected in gradients[0].items():
        assert expected.any()
        assert_close(gradients[1][name], expected, 2 * BLOCK_ROUNDINGS + 14, str(name))


@pytest.mark.field_report("A14")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@torch.no_grad()
def test_under_autocast_dtype_and_value_are_the_stock_blocks(family, dtype, x_dtype):
    stock, x = stock_block(family).to(dtype), torch.randn(3, 1, HIDDEN).to(x_dtype)
    oracle = copy.deepcopy(stock).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        want, got = stock(x), load_block(stock)(x)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    # The same roundings as the stock block or fewer, at other places: twice its error, plus one.
    allowed = 2 * (want - oracle).abs().max() + 2.0**-7 * oracle.abs().max()
    assert (got - oracle).abs().max() <= allowed


@pytest.mark.field_report("A14")
@torch.no_grad()
def test_without_autocast_two_dtypes_are_named():
    block = load_block(stock_block("deepseek_v3").to(torch.bfloat16))
    with pytest.raises(TypeError, match=r"expected bfloat16 like the expert weights, got float32"):
        block(torch.randn(2, 3, HIDDEN))


@pytest.mark.field_report("A11")
@torch.no_grad()
def test_a_gate_of_the_models_own_is_called():
    """gpt-oss: alternating, transposed, biased, with its own ``_apply_gate``."""
    experts = list(moe_blocks(build("gpt_oss")).values())[-1].experts
    x, ids = torch.randn(6, HIDDEN), torch.randint(0, EXPERTS, (6, TOP_K))
    weights = torch.rand(6, TOP_K)
    want, called = experts(x, ids, weights), []
    layer = load_experts(experts)
    assert not layer.is_silu_and_mul and layer.is_transposed
    assert layer.activation.__self__ is experts
    own = layer.activation
    layer.activation = lambda v: called.append(v.shape[-1]) or own(v)
    out = layer(x, StandardTopKOutput(weights, ids))
    assert_close(out, want, BLOCK_ROUNDINGS, "gpt_oss")
    assert set(called) == {2 * WIDTH}


@torch.no_grad()
def test_slices_of_a_loaded_layer():
    stock, x = stock_block("deepseek_v3"), torch.randn(1, 9, HIDDEN)
    want, total = stock(x), torch.zeros(1, 9, HIDDEN)
    for first in (0, 4):
        part = copy.deepcopy(stock)
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(part.experts, name).data
            setattr(part.experts, name, torch.nn.Parameter(whole[first : first + 4]))
        part.experts.num_experts = 4
        block = load_block(part, expert_range=(first, 4), shared_is_fused=first > 0)
        total += block(x)
    assert_close(total, want, 2 * BLOCK_ROUNDINGS, "slices")
