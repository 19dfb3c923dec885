# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused blocks that others change afterwards, share a config with, or compile."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations import transformers as integration
from sgl_moe_jit.integrations.transformers import block_table, experts
from sgl_moe_jit.moe.layer import FusedMoE

from .tiny_models import (
    BLOCK_ROUNDINGS,
    HIDDEN,
    assert_close,
    build,
    last_block,
    moe_blocks,
    tokens,
)

OURS = integration.EXPERTS_IMPLEMENTATION
fuse, unfuse = integration.fuse_shared_experts, integration.unfuse_shared_experts


class Adapter(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *args):
        return self.base(*args)


def _classes(model):
    return [type(m) for m in model.modules()]


@torch.no_grad()
def test_unfuse_after_the_experts_were_wrapped():
    model, ids = build("qwen2_moe"), tokens()
    stock = model(ids).logits
    report = fuse(model)
    for block in moe_blocks(model).values():
        block.experts = Adapter(block.experts)
    assert unfuse(model) == report.fused
    assert model.config._experts_implementation == "eager"
    assert torch.equal(model(ids).logits, stock)
    assert unfuse(model) == ()


def test_unfuse_refuses_before_it_changes_anything_when_a_class_was_changed():
    model = build("qwen2_moe")
    report = fuse(model)
    last = model.get_submodule(report.fused[-1])
    sharded = type(last)
    last.__class__ = type("FSDP" + sharded.__name__, (sharded,), {"__module__": "torch.fsdp"})
    classes = _classes(model)
    with pytest.raises(UnsupportedError, match=rf"block '{report.fused[-1]}'.*torch\.fsdp\.FSDP"):
        unfuse(model)
    assert _classes(model) == classes
    assert model.config._experts_implementation == OURS
    last.__class__ = sharded
    assert unfuse(model) == report.fused


def test_unfuse_refuses_while_an_instance_forward_may_hold_ours():
    model = build("deepseek_v3")
    report = fuse(model)
    last = model.get_submodule(report.fused[-1])
    last._old_forward = last.forward  # as accelerate's offloading does
    last.forward = lambda x: last._old_forward(x)
    classes = _classes(model)
    with pytest.raises(UnsupportedError, match=rf"block '{report.fused[-1]}'.*del block\.forward"):
        unfuse(model)
    assert _classes(model) == classes
    del last.forward, last._old_forward
    assert unfuse(model) == report.fused


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@torch.no_grad()
def test_layers_fused_and_unfused_one_by_one(order, deferred):
    model, ids = build("qwen2_moe"), tokens()
    stock = model(ids).logits
    blocks = list(moe_blocks(model).values())
    fuse(blocks[0])
    assert_close(model(ids).logits, stock, 2 * BLOCK_ROUNDINGS, "one layer fused")
    assert deferred == [True]
    fuse(blocks[1])
    unfuse(blocks[order[0]])
    deferred.clear()
    assert_close(model(ids).logits, stock, 2 * BLOCK_ROUNDINGS, "one layer left fused")
    assert deferred == [True]
    unfuse(blocks[order[1]])
    assert model.config._experts_implementation == "eager"
    assert torch.equal(model(ids).logits, stock)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_layers_of_a_copy_are_counted_apart_from_the_original(twin_of):
    model = build("qwen2_moe")
    fuse(model)
    twin = twin_of(model)
    blocks = list(moe_blocks(twin).values())
    unfuse(blocks[0])
    assert twin.config._experts_implementation == OURS
    unfuse(blocks[1])
    assert twin.config._experts_implementation == "eager"
    assert model.config._experts_implementation == OURS


def test_experts_without_a_config_are_skipped_with_a_reason():
    block = last_block("deepseek_v3")
    del block.experts.config
    ((_, reason),) = fuse(block).skipped
    assert reason.endswith(".config: expected a transformers config, got None")


def _stock_plain(self, hidden_states):
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    return self.experts(flat, ids, weights).view(*shape) + self.shared_experts(hidden_states)


def _minus(self, hidden_states):
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    return self.experts(flat, ids, weights).view(*shape) - self.shared_experts(hidden_states)


def _factor(self, hidden_states):
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    routed = self.experts(flat, ids, weights).view(*shape)
    return 2.5 * routed + self.shared_experts(hidden_states)


def _residual(self, hidden_states):
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    routed = self.experts(flat, ids, weights).view(*shape)
    return hidden_states + routed + self.shared_experts(hidden_states)


def _swapped(self, hidden_states):
    shape = hidden_states.shape
    _, weights, ids = self.gate(hidden_states)
    flat = hidden_states.view(-1, shape[-1])
    return self.experts(flat, weights, ids).view(*shape) + self.shared_experts(hidden_states)


@pytest.mark.parametrize(
    ("forward", "known"),
    [
        (_stock_plain, True),
        (_minus, False),
        (_factor, False),
        (_residual, False),
        (_swapped, False),
    ],
)
def test_a_forward_of_the_known_names_must_also_compute_the_known_sum(forward, known, monkeypatch):
    block = last_block("deepseek_v3")
    assert set(forward.__code__.co_names) == block_table.PLAIN.names
    monkeypatch.setattr(type(block), "forward", forward)
    report = fuse(block)
    assert bool(report.fused) is known
    assert known or "is not the one known here" in report.skipped[0][1]


def test_every_listed_class_of_the_installed_version_is_accepted():
    accepted = 0
    for name, (_, style) in block_table.SUPPORTED.items():
        try:
            module = __import__(block_table.modeling_module(name), fromlist=[name])
        except ModuleNotFoundError:
            continue  # of another version
        assert block_table.forward_is_known(getattr(module, name), style), name
        accepted += 1
    assert accepted >= 20


@pytest.mark.parametrize("register", ["backward_hook", "backward_pre_hook"])
def test_an_activation_with_a_backward_hook_is_not_replaced(register):
    m = last_block("deepseek_v3").experts
    assert experts.expert_weights(m).is_silu_and_mul
    getattr(m.act_fn, f"register_full_{register}")(lambda *args: None)
    assert not experts.expert_weights(m).is_silu_and_mul


class _Breaking(torch.nn.SiLU):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def _break_in_a_pre_hook(m):
    m.register_forward_pre_hook(lambda *args: torch._dynamo.graph_break())


def _break_in_the_activation(m):
    m.act_fn = _Breaking()


def _break_in_the_runner(m):
    wide = torch.empty(m.down_proj.shape[0], m.down_proj.shape[1], 2 * m.down_proj.shape[2] + 1)
    m.down_proj.data = wide[..., : m.down_proj.shape[2]].copy_(m.down_proj.data)


# A compilation each, so not every pair: which hook it is, and where the graph breaks, decide in
# different places.
@pytest.mark.parametrize(
    ("kind", "breaks"),
    [
        ("forward", _break_in_a_pre_hook),
        ("global", _break_in_a_pre_hook),
        ("backward", _break_in_a_pre_hook),
        ("forward", _break_in_the_activation),
        ("forward", _break_in_the_runner),
    ],
)
def test_a_hook_added_after_a_compile_that_broke_at_the_experts_gets_a_tensor(
    breaks, kind, deferred
):
    torch._dynamo.reset()
    block, x = last_block("deepseek_v3"), torch.randn(2, 3, HIDDEN, requires_grad=True)
    fuse(block)
    breaks(block.experts)
    eager = block(x)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(lambda v: block(v), fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda v: block(v), backend="eager")
    assert torch.equal(compiled(x), eager)
    seen, fused = [], block.experts
    if kind == "forward":
        handle = fused.register_forward_hook(lambda m, args, out: seen.append(out))
    elif kind == "backward":
        handle = fused.register_full_backward_hook(lambda m, grad_in, out: seen.append(out[0]))
    else:
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda m, args, out: seen.append(out) if m is fused else None
        )
    try:
        out = compiled(x)
        assert_close(out, eager, BLOCK_ROUNDINGS, "hooked")
        out.sum().backward()
    finally:
        handle.remove()
        torch._dynamo.reset()
    assert [type(s) for s in seen] == [torch.Tensor]


@pytest.mark.parametrize("wrong", [None, 3, torch.nn.Linear, [torch.nn.Linear(2, 2)]])
@pytest.mark.parametrize(
    "function",
    [
        fuse,
        unfuse,
        integration.load_block,
        integration.load_experts,
        FusedMoE.from_transformers,
    ],
)
def test_what_is_not_a_module_is_named(function, wrong):
    with pytest.raises(TypeError, match=r"^(model|block|experts): expected a torch.nn.Module, got"):
        function(wrong)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("shape", [(), (1, 3, 2 * HIDDEN), (3, 0)])
@torch.no_grad()
def test_an_input_of_another_shape_reaches_no_part_of_a_fused_block(family, shape):
    block = last_block(family)
    fuse(block)
    block.gate.forward = None  # whoever calls it fails otherwise
    text = rf"^hidden_states: expected \[..., {HIDDEN}\], got"
    with pytest.raises(ValueError, match=text):
        block(torch.zeros(shape))
