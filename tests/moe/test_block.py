# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``SharedExpertMoEBlock``: in which order its parts run, and which do not."""

import weakref

import pytest
import torch

from sgl_moe_jit.moe import block as block_module
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.deferred import (
    deferred_finalize_context,
    is_deferred_finalize_enabled,
)
from sgl_moe_jit.moe.shared_order import Order, OrderChoice
from tests.moe.layer_cases import FakeRunner, H, Mlp, TopKGate, logged_block, make_layer
from tests.moe.runner_cases import make_input

field_report = pytest.mark.field_report


def force_order(monkeypatch, order, deferred=True):
    def choose(shape, **kwargs):
        return OrderChoice(order, deferred, "for this test", ())

    monkeypatch.setattr(block_module, "make_plan", block_module.make_plan.__wrapped__)
    monkeypatch.setattr("sgl_moe_jit.moe.block_gates.choose_order", choose)


@torch.no_grad()
@pytest.mark.parametrize("defer", [True, False])
def test_the_shared_experts_wait_for_a_runner_that_leaves_its_input_alone(monkeypatch, defer):
    runner, x = FakeRunner([]), make_input(5)
    block = logged_block(runner)
    last = block.forward_normal(x, defer=defer)
    assert runner.log == ["gate", "topk", "routed", "shared"]
    assert block.last_plan.order is Order.ROUTED_FIRST
    assert block.last_plan.deferred is defer
    runner.log.clear()
    force_order(monkeypatch, Order.SHARED_FIRST, defer)
    first = block.forward_normal(x, defer=defer)
    assert runner.log == ["gate", "topk", "shared", "routed"]
    assert torch.equal(first, last)


@torch.no_grad()
@pytest.mark.parametrize("defer", [True, False])
def test_the_shared_experts_run_before_a_runner_that_overwrites_its_input(defer):
    x = make_input(5)
    want = logged_block(FakeRunner([]))(x.clone(), defer=defer)
    runner = FakeRunner([], says=True, does=True)
    block = logged_block(runner)
    assert torch.equal(block(x, defer=defer), want)
    assert runner.log == ["shared", "gate", "topk", "routed"]
    assert "input: no, the runner overwrites it" in str(block.explain())


@torch.no_grad()
def test_a_wrong_flag_is_caught_by_the_debug_check(monkeypatch):
    x, block = make_input(5), logged_block(FakeRunner([], does=True))
    want = logged_block(FakeRunner([]))(x.clone())
    assert not torch.equal(block(x.clone()), want)  # the silent error that the check is for
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_MUTATION", "1")
    with pytest.raises(RuntimeError, match="runner 'fake': declares mutates_input = False"):
        block(x.clone())


class OwnExperts(torch.nn.Module):
    """A caller's experts, that double their input in place although they say they do not."""

    mutates_input = False

    def forward(self, hidden_states, topk_output):
        return hidden_states.mul_(2.0).clone()


@torch.no_grad()
def test_experts_of_the_callers_own_are_checked_too(monkeypatch):
    x, block = make_input(5), SharedExpertMoEBlock(TopKGate(), OwnExperts(), Mlp())
    out = block(x.clone())
    assert not torch.equal(out, 2 * x + block.shared_experts(x))  # the silent error
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_MUTATION", "1")
    text = "experts, a OwnExperts: declares mutates_input = False and changed 5 of 5 rows"
    with pytest.raises(RuntimeError, match=text):
        block(x.clone())
    block.experts.mutates_input = True
    assert torch.equal(block(x.clone()), 2 * x + block.shared_experts(x))


@torch.no_grad()
@field_report("M6")
@pytest.mark.parametrize("says", [True, False])
def test_no_tokens_run_router_and_experts_and_no_shared_experts(says):
    runner = FakeRunner([], says=says)
    block = logged_block(runner)
    assert block(torch.empty(2, 0, H)).shape == (2, 0, H)
    assert runner.log == ["gate", "topk", "routed"]
    assert "shared experts: no, no tokens" in block.last_plan.refusals


@field_report("A17")
def test_no_tokens_with_gradients_give_zeros_to_every_parameter():
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(), torch.nn.Linear(H, 1))
    block(torch.empty(0, H)).sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@torch.no_grad()
def test_fused_or_absent_shared_experts_are_not_called_and_not_missed():
    x = make_input(5)
    runner = FakeRunner([])
    fused = logged_block(runner, shared_is_fused=True)
    out = fused(x)
    assert runner.log == ["gate", "topk", "routed"]
    assert "shared experts: no, fused into the routed experts" in fused.last_plan.refusals
    absent = SharedExpertMoEBlock(fused.gate, fused.experts, read_gate=fused.read_gate)
    assert torch.equal(absent(x), out)
    assert "shared experts: no, none" in absent.last_plan.refusals


@torch.no_grad()
@pytest.mark.parametrize("defer", [True, False])
def test_the_routed_workspace_is_gone_when_the_shared_experts_start(defer):
    held = []

    def workspace():
        made = torch.empty(1 << 16)
        held.append(weakref.ref(made))
        return made

    def look():
        assert held[-1]() is None

    block = logged_block(FakeRunner([], workspace=workspace), look=look)
    for _ in range(2):
        block(make_input(5), defer=defer)
    assert len(held) == 2


@torch.no_grad()
@pytest.mark.parametrize("part", ["gate", "routed", "shared"])
@pytest.mark.parametrize("says", [True, False])
def test_after_an_exception_the_next_call_is_right(monkeypatch, part, says):
    runner, x = FakeRunner([], says=says), make_input(5)
    block = logged_block(runner)
    want = block(x)

    def fail(*args, **kwargs):
        raise KeyError(part)

    with monkeypatch.context() as patch:
        if part == "routed":
            patch.setattr(runner, "run", fail)
        else:
            child = block.gate if part == "gate" else block.shared_experts
            patch.setattr(child.inner, "forward", fail)
        with pytest.raises(KeyError, match=part), deferred_finalize_context():
            block(x)
    assert not is_deferred_finalize_enabled()
    assert torch.equal(block(x), want)
