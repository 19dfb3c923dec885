# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Why a block does not defer, and why it stays on one stream: each reason, in words."""

import dataclasses

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.block_gates import BlockFacts, StreamFacts, make_plan
from sgl_moe_jit.moe.deferred import deferred_finalize_context
from sgl_moe_jit.moe.runners.base import Support
from sgl_moe_jit.moe.shared_order import BlockShape, Order
from sgl_moe_jit.moe.topk import TopKFormat
from tests.moe.layer_cases import FakeRunner, H, Mlp, TopKGate, logged_block, make_layer
from tests.moe.runner_cases import make_input

field_report = pytest.mark.field_report
ON_CUDA = StreamFacts(True, "cuda", False, False, False, "", 100, 128)
FACTS = BlockFacts(
    shape=BlockShape(100, 8, 64, 32, 96, 2),
    add_late=False,
    topk_format=TopKFormat.STANDARD,
    support=Support(True),
    experts_refusal="",
    requested=None,
    enabled=True,
    max_tokens=0,
    stream=ON_CUDA._replace(wanted=False),
)


def test_nothing_against_it():
    plan = make_plan(FACTS)
    assert plan.deferred and not plan.dual_stream and plan.order is Order.ROUTED_FIRST
    assert plan.refusals == ("setting: no, declined",)
    plan = make_plan(FACTS._replace(stream=ON_CUDA))
    assert plan.deferred and plan.dual_stream and plan.refusals == () and plan.memory is None


@pytest.mark.parametrize("tokens", [(128, 128), (129, 0), (129, -1)])
def test_a_second_stream_in_a_capture_up_to_a_cap(tokens):
    capturing = ON_CUDA._replace(wanted=None, capturing=True)
    assert capturing._replace(num_tokens=tokens[0], max_tokens=tokens[1]).ok
    assert ON_CUDA._replace(num_tokens=10**6).ok, "asked for"


@field_report("C6")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"requested": False}, "request: no, declined by the caller"),
        ({"enabled": False}, "switch: no, SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE is off"),
        ({"shape": FACTS.shape._replace(num_tokens=0)}, "tokens: no, 0"),
        (
            {"stream": FACTS.stream._replace(no_shared="fused into the routed experts")},
            "shared experts: no, fused into the routed experts",
        ),
        ({"add_late": True}, "placement: no, replicated over the group, so added once, after"),
        (
            {"support": Support(False, "runner 'r' finishes its own output for format 'packed'")},
            "format and quantization: no, runner 'r' finishes its own output for format 'packed'",
        ),
        ({"shape": FACTS.shape._replace(top_k=65)}, "top_k: no, 65, of 1 to 64"),
        (
            {"max_tokens": 99},
            "cap: no, 100 tokens, SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS is 99",
        ),
        ({"experts_refusal": "a hook on them"}, "experts: no, a hook on them"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_each_reason_against_deferral(change, reason, stream):
    facts = FACTS._replace(**change)
    facts = facts._replace(stream=facts.stream._replace(wanted=stream))
    plan = make_plan(facts)
    assert not plan.deferred
    assert any(refusal.startswith(reason) for refusal in plan.refusals), plan.refusals
    assert reason in str(plan)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wanted": False}, "setting: no, declined"),
        ({"wanted": None}, "setting: no, not inside a CUDA graph capture; dual_stream=True"),
        (
            {"wanted": None, "capturing": True, "num_tokens": 129},
            "setting: no, 129 tokens, more than the 128 of SGL_MOE_JIT_DUAL_STREAM_MAX_TOKENS",
        ),
        ({"device": "cpu"}, "device: no, cpu"),
        ({"no_shared": "no tokens"}, "shared experts: no, no tokens"),
        ({"mutates_input": True}, "input: no, the runner overwrites it while the shared experts"),
        ({"needs_grad": True}, "gradients: no, needed"),
    ],
)
def test_each_reason_against_a_second_stream(change, reason):
    facts = ON_CUDA._replace(**change)
    assert ON_CUDA.ok and not facts.ok
    plan = make_plan(FACTS._replace(stream=facts))
    assert not plan.dual_stream
    assert any(refusal.startswith(reason) for refusal in plan.refusals), plan.refusals
    # what `ok` computes for speed is what the checks say
    assert facts.ok is all(check.ok for check in facts.checks())


def test_with_gradients_the_order_is_one_and_the_memory_model_is_not_asked():
    """Both keep what they made, and gradients of the input add up in the order of traced code."""
    wide_shared = FACTS._replace(shape=BlockShape(100, 2, 64, 32, 4096, 2))
    assert make_plan(wide_shared).order is Order.SHARED_FIRST
    plan = make_plan(wide_shared._replace(stream=FACTS.stream._replace(needs_grad=True)))
    assert plan.order is Order.ROUTED_FIRST and plan.deferred and plan.memory is None
    mutates = FACTS.stream._replace(needs_grad=True, mutates_input=True)
    assert make_plan(FACTS._replace(stream=mutates)).order is Order.SHARED_FIRST


def test_inside_a_capture_two_streams_are_the_default():
    assert ON_CUDA._replace(wanted=None, capturing=True).ok
    assert not ON_CUDA._replace(wanted=False, capturing=True).ok


@pytest.mark.parametrize(
    ("cap", "num_tokens", "deferred"),
    [(192, 192, True), (192, 193, False), (0, 100000, True), (-1, 193, True), (192, 0, False)],
)
def test_the_token_cap(monkeypatch, cap, num_tokens, deferred):
    monkeypatch.setenv("SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS", str(cap))
    facts = FACTS._replace(
        shape=FACTS.shape._replace(num_tokens=num_tokens),
        max_tokens=env.DEFERRED_FINALIZE_MAX_TOKENS.get(),
    )
    assert make_plan(facts).deferred is deferred


def test_the_cap_takes_integers_only(monkeypatch):
    assert env.DEFERRED_FINALIZE_MAX_TOKENS.get() == 0
    monkeypatch.setenv("SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS", "many")
    text = "SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS: expected an integer, got 'many'"
    with pytest.raises(ValueError, match=text):
        env.DEFERRED_FINALIZE_MAX_TOKENS.get()


@torch.no_grad()
def test_a_block_reads_variables_argument_and_context(monkeypatch):
    runner, x = FakeRunner([]), make_input(5)
    block = logged_block(runner)

    def asked(**kwargs):
        block(x, **kwargs)
        assert block.last_plan.deferred is runner.seen[-1][1]
        return runner.seen[-1][1]

    assert asked() and asked(defer=True) and not asked(defer=False)
    with deferred_finalize_context():
        assert asked() and not asked(defer=False)
    with deferred_finalize_context(enabled=False):
        assert not asked() and asked(defer=True)
        with deferred_finalize_context():
            assert asked()
    monkeypatch.setenv("SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS", "4")
    assert not asked() and not asked(defer=True)
    monkeypatch.setenv("SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS", "5")
    assert asked()
    monkeypatch.setenv("SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE", "0")
    assert not asked() and not asked(defer=True)


@torch.no_grad()
def test_a_runner_that_cannot_defer_is_said_so():
    block = logged_block(FakeRunner([], defers=False))
    want = logged_block(FakeRunner([]))(make_input(5), defer=False)
    assert torch.equal(block(make_input(5), defer=True), want)
    text = "format and quantization: no, runner 'fake' finishes its own output: standard format"
    assert any(refusal.startswith(text) for refusal in block.last_plan.refusals)
    block = SharedExpertMoEBlock(TopKGate().double(), make_layer().double(), Mlp().double())
    block(make_input(5).double())
    assert "no, runner 'native' finishes its own output: " in str(block.explain())


@torch.no_grad()
def test_an_explanation_is_frozen_and_readable():
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp())
    assert str(block.explain()).startswith("not called yet\nFusedMoE, one rank: grouped_mm")
    block(make_input(5))
    plan = block.last_plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.deferred = False
    text = str(block.explain())
    first = text.splitlines()[0]
    assert first == "forward_normal, 5 tokens: routed first; one fused finalize"
    assert "memory: routed first, deferral needs no more memory" in text
    assert "cap: ok, 5 tokens, SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS is off" in text
    assert "device: no, cpu" in text
    assert "\nFusedMoE, one rank: grouped_mm (asked for: auto)\n" in text
    block.forward_normal_dual_stream(make_input(5))  # refused on a CPU, and still right
    assert block.last_plan.refusals == ("device: no, cpu",)
    assert make_input(5).shape == (5, H)


@field_report("M15")
def test_the_switches_of_a_suspect_give_the_same_bits(monkeypatch):
    """Deferral off, one by one with the kernel's own switches."""
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp())
    x = make_input(9)
    with torch.no_grad():
        want = block(x, defer=False)
        for name in ("PDL", "VECTOR"):
            monkeypatch.setenv(f"SGL_MOE_JIT_{name}", "0")
            assert torch.equal(block(x, defer=False), want)
            on = block(x)
            monkeypatch.delenv(f"SGL_MOE_JIT_{name}")
            assert torch.equal(block(x), on)
