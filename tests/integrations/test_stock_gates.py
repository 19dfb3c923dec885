# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' own routers: when the kernel may stand in for them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sgl_moe_jit.integrations.transformers import fuse_shared_experts, load_block
from sgl_moe_jit.integrations.transformers import unfuse_shared_experts as unfuse
from sgl_moe_jit.integrations.transformers.gate_table import style_of_gate
from sgl_moe_jit.integrations.transformers.stock_gates import read_gate
from sgl_moe_jit.moe import topk_selection
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.ops import route_topk
from sgl_moe_jit.ops.route_topk import RouteFlag

from .tiny_models import (
    ALL_FUSED_FAMILIES,
    BLOCK_ROUNDINGS,
    HIDDEN,
    assert_close,
    build,
    last_block,
    moe_blocks,
    recorded_router_logits,
    tokens,
)

TAKEN = "one kernel after its logits"


@pytest.fixture
def kernel(monkeypatch):
    """Lets the CPU pass for a GPU whose kernel is the torch form; collects its calls' options."""
    for family in ALL_FUSED_FAMILIES:  # known before the first call, or the trials would count
        cls = type(last_block(family).gate)
        style_of_gate(cls, cls.forward)
    calls = []

    def route(logits, options, bias=None, scale=None, count=None, weights_dtype=torch.float32):
        calls.append(options)
        flags = RouteFlag(options.flags)
        routing = RouterConfig(
            *(options.num_experts, options.top_k),
            score_function=route_topk.SCORE_FUNCTIONS[options.score_function],
            has_correction_bias=bias is not None,
            n_group=options.n_group,
            topk_group=options.topk_group,
            group_rule="max" if RouteFlag.GROUP_BY_MAX in flags else "top2_sum",
            renormalize=RouteFlag.RENORMALIZE in flags,
            renormalize_epsilon=options.epsilon,
            routed_scaling_factor=options.factor,
            weights_dtype="hidden",
        )
        with monkeypatch.context() as patch:
            patch.setattr(route_topk, "is_cuda", lambda x: False)
            return topk_selection.select(
                *(logits, routing, bias),
                num_token_non_padded=count,
                topk_ids=None,
                expert_scale=scale,
                hidden_dtype=weights_dtype,
            )

    monkeypatch.setattr(route_topk, "is_cuda", lambda x: True)
    monkeypatch.setattr(route_topk, "route_topk", route)
    return calls


def fused(block):
    fuse_shared_experts(block)
    return block


both_ways = pytest.mark.parametrize("ours", [load_block, fused])


@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@both_ways
@torch.no_grad()
def test_a_block_routes_by_the_kernel_and_says_so(kernel, family, ours):
    stock, x = last_block(family), torch.randn(2, 7, HIDDEN)
    want = stock(x)
    block = ours(stock)
    assert "router:" not in str(block.explain())
    assert_close(block(x), want, BLOCK_ROUNDINGS, family)
    assert len(kernel) == 1
    assert f"router: {type(block.gate).__name__}: {TAKEN}" in str(block.explain())
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(twin(x), block(x))
    if ours is fused:
        unfuse(block)
        assert "_routed_by" not in block.__dict__ and torch.equal(block(x), want)


@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@torch.no_grad()
def test_the_routers_choice_and_weights(kernel, family):
    gate = last_block(family).gate
    for dtype in (torch.float32, torch.bfloat16):
        gate.weight.data = gate.weight.data.to(dtype)
        x = torch.randn(50, HIDDEN).to(dtype)
        want = read_gate(gate(x))
        got, text = read_gate.route(gate, x)
        assert text.endswith(TAKEN) and got.num_experts == want.num_experts
        assert got.topk_weights.dtype == want.topk_weights.dtype
        mine, theirs = got.topk_ids.long().sort(-1), want.topk_ids.sort(-1)
        same = (mine.values == theirs.values).all(-1)
        assert bool(same.all()) or got.topk_weights.dtype == torch.bfloat16  # whose logits tie
        torch.testing.assert_close(
            got.topk_weights.gather(-1, mine.indices)[same],
            want.topk_weights.gather(-1, theirs.indices)[same],
            rtol=2.0**-7 if got.topk_weights.dtype == torch.bfloat16 else 2.0**-20,
            atol=0,
        )


@torch.no_grad()
def test_an_attribute_counts_from_the_next_call_on(kernel):
    block = fused(last_block("deepseek_v3"))
    x = torch.randn(3, 5, HIDDEN)
    block(x)
    block.gate.routed_scaling_factor, block.gate.num_group, block.gate.topk_group = 3.0, 1, 1
    block.gate.norm_topk_prob, block.gate.top_k = False, 3
    got = block(x)
    assert (kernel[0].factor, kernel[0].n_group) == (2.5, 2)
    assert kernel[1].top_k == 3 and kernel[1].n_group == 1 and kernel[1].factor == 3.0
    unfuse(block)
    assert_close(got, block(x), BLOCK_ROUNDINGS + 1, "changed")


# block.bfloat16() rounds the bias too; the stock forward adds it to float32 scores as it is.
@torch.no_grad()
def test_a_bias_that_was_cast_with_the_block_counts_as_it_is(kernel):
    block = fused(last_block("deepseek_v3"))
    gate, x = block.gate, torch.randn(3, 5, HIDDEN)
    gate.e_score_correction_bias = torch.randn(gate.weight.shape[0]).bfloat16()
    got = block(x)
    assert len(kernel) == 1
    unfuse(block)
    assert_close(got, block(x), BLOCK_ROUNDINGS + 1, "bias")


def _hook(block, monkeypatch):
    block.gate.register_forward_hook(lambda *a: None)
    return "a hook on it"


def _pre_hook(block, monkeypatch):
    block.gate.register_forward_pre_hook(lambda *a: None)
    return "a hook on it"


def _global_hook(block, monkeypatch):
    hooks = torch.nn.modules.module._global_forward_hooks
    monkeypatch.setitem(hooks, "of this test", lambda *a: None)
    return "a hook on it"


def _own_forward(block, monkeypatch):
    monkeypatch.setitem(block.gate.__dict__, "forward", block.gate.forward)
    return "its forward is replaced on the instance"


def _class_forward(block, monkeypatch):
    cls, old = type(block.gate), type(block.gate).forward
    monkeypatch.setattr(cls, "forward", lambda self, x: old(self, x))
    return "not a router known here"


def _class_call(block, monkeypatch):
    own = torch.nn.Module.__call__
    monkeypatch.setattr(type(block.gate), "__call__", lambda self, x: own(self, x))
    return "its class has a call of its own"


def _module_call(block, monkeypatch):
    own = torch.nn.Module.__call__
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda self, *a, **k: own(self, *a, **k))
    return "its class has a call of its own"


def _parametrized(block, monkeypatch):
    torch.nn.utils.parametrize.register_parametrization(block.gate, "weight", torch.nn.Identity())
    return "not a router known here"


def _switched_off(block, monkeypatch):
    monkeypatch.setenv("SGL_MOE_JIT_ROUTING_KERNEL", "0")
    return "SGL_MOE_JIT_ROUTING_KERNEL is off"


def _wide_bias(block, monkeypatch):
    gate = block.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.double()
    return "correction_bias is torch.float64"


def _bias_of_a_row(block, monkeypatch):
    block.gate.e_score_correction_bias = block.gate.e_score_correction_bias[None]
    return "its bias is not one number an expert"


def _factor_in_a_tensor(block, monkeypatch):
    block.gate.routed_scaling_factor = torch.tensor(2.5)
    return "routed_scaling_factor is a Tensor"


CHANGES = [_hook, _pre_hook, _global_hook, _own_forward, _class_forward, _class_call, _module_call]
CHANGES += [_parametrized, _switched_off, _wide_bias, _bias_of_a_row, _factor_in_a_tensor]


@both_ways
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_sends_the_call_to_the_module(kernel, monkeypatch, change, ours):
    block, x = ours(last_block("deepseek_v3")), torch.randn(2, 3, HIDDEN)
    reason = change(block, monkeypatch)
    block(x)
    assert kernel == []
    assert f"called as a module, {reason}" in str(block.explain())


@pytest.mark.parametrize(
    ("name", "value"),
    [("e_score_correction_bias", None), ("top_k", 2.0), ("routed_scaling_factor", "2.5")],
)
@torch.no_grad()
def test_what_a_router_refuses_is_still_refused(kernel, name, value):
    gate, x = last_block("deepseek_v3").gate, torch.randn(3, HIDDEN)
    assert read_gate.route(gate, x)[0] is not None
    setattr(gate, name, value)
    assert read_gate.route(gate, x)[0] is None
    with pytest.raises(TypeError):
        gate(x)


@torch.no_grad()
def test_a_first_call_that_is_traced_tries_no_router(kernel):
    gate, x = last_block("deepseek_v3").gate, torch.randn(3, HIDDEN)
    style_of_gate.cache_clear()

    def call(x):
        assert read_gate.route(gate, x)[0] is None
        return gate(x)[1]

    traced, stock = make_fx(call)(x), make_fx(lambda x: gate(x)[1])(x)
    assert len(traced.graph.nodes) == len(stock.graph.nodes)
    assert style_of_gate(type(gate), type(gate).forward) is not None


@both_ways
def test_gradients_and_compilers_send_it_too(kernel, ours):
    block, x = ours(last_block("deepseek_v3")), torch.randn(2, 3, HIDDEN)
    block(x).sum().backward()
    assert block.gate.weight.grad is not None
    assert "called as a module, gradients" in str(block.explain())
    with torch.no_grad():
        compiled = torch.compile(block, backend="eager")
        compiled(x)
    assert kernel == []


@pytest.mark.field_report("A21")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@torch.no_grad()
def test_router_logits_are_recorded(kernel, family):
    model, ids = build(family), tokens()
    want = recorded_router_logits(build(family), ids)
    fuse_shared_experts(model)
    model(ids)
    count = len(kernel)
    assert count == len(moe_blocks(model))
    got = model(ids, output_router_logits=True).router_logits
    assert len(kernel) == count and len(got) == len(want) == count
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs, 4 * BLOCK_ROUNDINGS, family)


@pytest.mark.parametrize("implementation", [None, "eager"])
@torch.no_grad()
def test_who_looks_at_the_experts_sees_the_stock_routers_ids(kernel, implementation):
    block, seen = fused(last_block("deepseek_v3")), []
    x = torch.randn(2, 3, HIDDEN)
    want = block(x)
    if implementation is not None:
        block.experts.config._experts_implementation = implementation
    else:
        block.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1].dtype))
    assert_close(block(x), want, BLOCK_ROUNDINGS, str(implementation))
    assert len(kernel) == 2 and set(seen) <= {torch.int64}
