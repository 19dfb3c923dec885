# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused models on a GPU: ``generate`` with CUDA graphs, captures, wide layers in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse

from .layer_oracle import block_oracle, check_block
from .tiny_models import (
    ALL_FUSED_FAMILIES,
    HIDDEN,
    LOGIT_ROUNDINGS,
    assert_close,
    build,
    last_block,
    moe_blocks,
    settings_of,
    tokens,
)

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Sizes of published layers, with fewer experts. Qwen2 is the 57B one, Qwen3 the 235B one.
WIDE = {
    "deepseek_v3": {"hidden_size": 7168, "moe_intermediate_size": 2048},
    "glm4_moe": {"hidden_size": 5120, "moe_intermediate_size": 1536},
    "qwen2_moe": {
        "hidden_size": 3584,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
    },
    "qwen3_moe": {"hidden_size": 4096, "moe_intermediate_size": 1536},
    "deepseek_v2": {"hidden_size": 5120, "moe_intermediate_size": 1536, "n_shared_experts": 2},
    "kimi_k2": {"hidden_size": 7168, "moe_intermediate_size": 2048},
}


@pytest.fixture(autouse=True)
def _no_grad_and_fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def wide_block(family, device):
    """One block of published width in bfloat16, with weights that keep the size of a row."""
    name, settings = settings_of(family)
    experts = {"n_routed_experts": 16, "num_experts": 16, "num_experts_per_tok": 8, "n_group": 1}
    settings.update({key: value for key, value in experts.items() if key in settings})
    config = getattr(transformers, f"{name}Config")(**{**settings, **WIDE[family]})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = type(last_block(family))(config).to(device, BF16).eval()
    for parameter in block.parameters():
        parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return block


@pytest.mark.parametrize("num_tokens", [1, 64, 512])
@pytest.mark.parametrize("family", WIDE)
def test_a_wide_layer_against_float64(family, num_tokens, device="cuda"):
    block = wide_block(family, device)
    x = torch.randn(1, num_tokens, block.gate.weight.shape[-1], device=device).to(BF16)
    want, allowed = block_oracle(block, x)
    fuse(block)
    check_block(block(x), want, allowed, family)
    assert block.last_plan.deferred is (family != "qwen3_moe")


@pytest.mark.field_report("A25")
@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
def test_generate_with_a_static_cache_and_compiled_decode_gives_stocks_tokens(family):
    """transformers compiles the decode step with mode ``reduce-overhead`` here by itself."""
    model, ids = build(family).cuda(), tokens().cuda()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    stock = model.generate(ids, **settings)
    assert fuse(model).fused
    assert torch.equal(model.generate(ids, **settings), stock)
    got = model.generate(ids, cache_implementation="static", **settings)
    assert hasattr(model, "_compiled_call")
    assert torch.equal(got, stock)


@pytest.mark.field_report("A20")
@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
def test_reduce_overhead_replays_a_graph_and_sees_weight_updates(family):
    block = last_block(family).to("cuda", BF16)
    stock = copy.copy(block)  # on the same parameters
    fuse(block)
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):  # warms up, records, replays
        torch.manual_seed(seed)
        x = torch.randn(4, 1, HIDDEN, device="cuda").to(BF16)
        want, allowed = block_oracle(stock, x)
        torch.compiler.cudagraph_mark_step_begin()
        check_block(compiled(x).clone(), want, allowed, f"{family}, call {seed}")
        if seed == 3:
            for parameter in block.parameters():
                parameter.copy_(parameter.flip(0))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_float32_model_compiled_with_reduce_overhead():
    """torch's float32 grouped GEMM reads sizes on the host: left out of the graphs, not refused."""
    model, ids = build("deepseek_v3").cuda(), tokens().cuda()
    fuse(model)
    eager = model(ids).logits
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(ids).logits.clone(), eager, LOGIT_ROUNDINGS, "logits")


@pytest.mark.field_report("A20")
@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
def test_a_captured_block_has_two_streams_and_sees_weight_updates(family):
    block = last_block(family).to("cuda", BF16)
    fuse(block)
    x = torch.randn(4, 1, HIDDEN, device="cuda").to(BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            block(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block(x)
    assert block.last_plan.dual_stream is block.last_plan.deferred is (family != "qwen3_moe")
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(4, 1, HIDDEN))
        graph.replay()
        assert torch.equal(out, block.forward_normal(x))
        for parameter in block.parameters():
            parameter.copy_(parameter.flip(0))


@pytest.mark.multigpu
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_a_model_placed_on_two_devices(family):
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    model, ids = build(family), tokens()
    stock = model(ids).logits
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    places |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    big_modeling.dispatch_model(model, places)
    assert fuse(model).fused
    assert_close(model(ids.cuda()).logits.cpu(), stock, LOGIT_ROUNDINGS, family)
    assert all(block.last_plan.deferred for block in moe_blocks(model).values())
