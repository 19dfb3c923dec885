# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Whole transformers models: logits, generated tokens, saving, router logits."""

from __future__ import annotations

import pytest
import torch
import transformers

from sgl_moe_jit.integrations import transformers as integration

from .tiny_models import (
    ALL_FUSED_FAMILIES,
    FAMILIES,
    FUSED_FAMILIES,
    LOGIT_ROUNDINGS,
    assert_close,
    build,
    moe_blocks,
    tokens,
)

OURS = integration.EXPERTS_IMPLEMENTATION


def _generate(model, ids, **settings):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **settings
    )


@pytest.mark.field_report("A25")
@pytest.mark.parametrize("family", FAMILIES)
def test_implementation_equals_stock_there_and_back(family):
    model, ids = build(family), tokens()
    with torch.no_grad():
        stock = model(ids).logits
        handles = [
            block.experts.register_forward_hook(lambda module, args, out: out * 0)
            for block in moe_blocks(model).values()
        ]
        # the rest is worth something only if the experts matter
        assert (model(ids).logits - stock).abs().max() > 1e-2 * stock.abs().max()
        for handle in handles:
            handle.remove()
        model.set_experts_implementation(OURS)
        assert model.config._experts_implementation == OURS
        assert_close(model(ids).logits, stock, LOGIT_ROUNDINGS, f"{family} logits")
        model.set_experts_implementation("eager")
        assert torch.equal(model(ids).logits, stock)


@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
def test_fused_equals_stock_there_and_back(family):
    model, ids = build(family), tokens()
    with torch.no_grad():
        stock = model(ids).logits  # fused only after a first call
        report = integration.fuse_shared_experts(model)
        assert report.fused == tuple(moe_blocks(model))
        assert report.skipped == ()
        assert_close(model(ids).logits, stock, LOGIT_ROUNDINGS, f"{family} fused logits")
        assert integration.unfuse_shared_experts(model) == report.fused
        assert model.config._experts_implementation == "eager"
        assert torch.equal(model(ids).logits, stock)


@pytest.mark.field_report("A25")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generated_tokens_equal_stock(family, seed):
    model, ids = build(family, seed), tokens(seed)
    stock = _generate(model, ids)
    model.set_experts_implementation(OURS)
    assert torch.equal(_generate(model, ids), stock)
    assert model.config._experts_implementation == OURS  # generate() swaps some names
    if family in FUSED_FAMILIES:
        integration.fuse_shared_experts(model)
        assert torch.equal(_generate(model, ids), stock)


@pytest.mark.field_report("A25")
def test_static_cache_keeps_our_implementation_in_prefill_and_decode():
    model, ids = build("deepseek_v3"), tokens()
    stock = _generate(model, ids)
    integration.fuse_shared_experts(model)
    rows = []
    experts = next(iter(moe_blocks(model).values())).experts
    experts.register_forward_pre_hook(
        lambda module, args: rows.append((args[0].shape[0], module.config._experts_implementation))
    )
    assert torch.equal(_generate(model, ids, cache_implementation="static"), stock)
    assert rows[0] == (ids.numel(), OURS)
    assert set(rows[1:]) == {(ids.shape[0], OURS)}


@pytest.mark.field_report("A25")
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_save_and_load(family, tmp_path):
    model, ids = build(family), tokens()
    keys = list(model.state_dict())
    if family in FUSED_FAMILIES:
        integration.fuse_shared_experts(model)
    else:
        model.set_experts_implementation(OURS)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert OURS not in (tmp_path / "config.json").read_text()
    auto = transformers.AutoModelForCausalLM
    with torch.no_grad():
        got = model(ids).logits
        stock = auto.from_pretrained(tmp_path, experts_implementation="eager").eval()
        loaded = auto.from_pretrained(tmp_path, experts_implementation=OURS).eval()
        assert type(stock) is type(loaded) is type(model)
        assert loaded.config._experts_implementation == OURS
        assert list(stock.state_dict()) == keys
        for name, tensor in model.state_dict().items():
            assert torch.equal(stock.state_dict()[name], tensor), name
        assert_close(stock(ids).logits, got, LOGIT_ROUNDINGS, "stock from our checkpoint")
        assert_close(loaded(ids).logits, got, LOGIT_ROUNDINGS, "ours from our checkpoint")


@pytest.mark.field_report("A21")
@pytest.mark.parametrize("first_call", ["before fusion", "after fusion"])
@pytest.mark.parametrize("family", FAMILIES)
def test_router_logits_and_aux_loss_survive(family, first_call):
    ids = tokens()

    def call(model):
        with torch.no_grad():
            return model(ids, labels=ids, output_router_logits=True)

    stock, model = call(build(family)), build(family)
    if first_call == "before fusion":
        call(model)  # installs the recording hooks on the stock modules
    if family in FUSED_FAMILIES:
        assert integration.fuse_shared_experts(model).fused
    else:
        model.set_experts_implementation(OURS)
    got = call(model)
    expected = getattr(stock, "router_logits", None)
    if expected is None:  # this version records none for this family
        assert getattr(got, "router_logits", None) is None
        return
    assert len(got.router_logits) == len(expected) > 0
    for mine, theirs in zip(got.router_logits, expected, strict=True):
        assert_close(mine, theirs, LOGIT_ROUNDINGS, "router logits")
    if getattr(stock, "aux_loss", None) is not None:
        assert_close(got.aux_loss, stock.aux_loss, LOGIT_ROUNDINGS, "aux loss")


@pytest.mark.field_report("A25")
def test_sub_config_of_a_vision_language_model():
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 48,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 2, 2],
            },
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        },
    )
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    model.set_experts_implementation("eager")
    ids = tokens()
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        model.set_experts_implementation(OURS)
        assert model.config.text_config._experts_implementation == OURS
        got = model(input_ids=ids).logits
    assert_close(got, stock, LOGIT_ROUNDINGS, "text logits")
