# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The memory model: its numbers by hand, its choice, and against bytes counted on a CPU."""

import pytest
import torch

from sgl_moe_jit.moe import block as block_module
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.shared_order import (
    SLACK_BYTES,
    BlockShape,
    Order,
    OrderChoice,
    choose_order,
    shared_width_of,
)
from tests.moe.layer_cases import FakeRunner, LiveBytes, Mlp, TopKGate, logged_block, make_layer
from tests.moe.runner_cases import make_input

ROUTED, SHARED = Order.ROUTED_FIRST, Order.SHARED_FIRST
# Two bytes an element, one token: T 1, K 2, H 10, I 4, shared 6 elements.
TINY = BlockShape(1, 2, 10, 4, 6, 2)
DEEPSEEK_V3 = BlockShape(16384, 8, 7168, 2048, 3 * 2048, 2)
COSTLY = BlockShape(16384, 8, 4096, 64, 4096, 2)
MIB = 1 << 20


def test_bytes_by_hand():
    assert (TINY.output_bytes, TINY.rows_bytes) == (20, 40)
    assert TINY.workspace_bytes == 2 * (10 + 2 * 4) * 2 == 72
    assert TINY.shared_workspace_bytes == 12
    assert TINY._replace(has_gate=False).workspace_bytes == 2 * (10 + 4) * 2 == 56
    x, ws, rows, s_ws, out = 20, 72, 40, 12, 20
    assert TINY.peak_bytes(SHARED, False) == x + max(s_ws + out, out + ws, out + rows + out)
    assert TINY.peak_bytes(ROUTED, False) == x + max(ws, rows + out, out + s_ws + out)
    assert TINY.peak_bytes(SHARED, True) == x + max(s_ws + out, out + ws, out + rows + out)
    assert TINY.peak_bytes(ROUTED, True) == x + max(ws, rows + s_ws + out, rows + out + out)
    # with a wide shared expert its own terms decide
    wide = TINY._replace(shared_width=500)
    assert wide.peak_bytes(SHARED, False) == 20 + 1000 + 20
    assert wide.peak_bytes(ROUTED, False) == 20 + 20 + 1000 + 20
    assert wide.peak_bytes(ROUTED, True) == 20 + 40 + 1000 + 20


def test_deepseek_v3_prefill_saves_the_shared_output_and_defers_for_nothing():
    choice = choose_order(DEEPSEEK_V3, mutates_input=False, may_defer=True)
    assert (choice.order, choice.deferred) == (ROUTED, True)
    peaks = {(p.order, p.deferred): p.bytes for p in choice.peaks}
    # the shared output: 16384 x 7168 bfloat16
    assert peaks[SHARED, False] - peaks[ROUTED, True] == 224 * MIB
    assert peaks[ROUTED, False] == peaks[ROUTED, True]
    assert "deferral needs no more memory" in str(choice)
    assert "routed first, deferred: " in str(choice)


def test_rows_are_not_kept_across_shared_experts_that_need_much():
    # one wide shared expert beside narrow routed ones: K 8, I 64, I_s 65536
    shape = BlockShape(4096, 8, 2048, 64, 3 * 65536, 2)
    choice = choose_order(shape, mutates_input=False, may_defer=True)
    peaks = {(p.order, p.deferred): p.bytes for p in choice.peaks}
    # Shared first needs no rows beside its workspace, deferred or not.
    assert (choice.order, choice.deferred) == (SHARED, True)
    assert peaks[ROUTED, True] - peaks[SHARED, True] == shape.rows_bytes
    # kept rows and shared workspace together are more than the routed workspace
    choice = choose_order(COSTLY, mutates_input=False, may_defer=True)
    assert (choice.order, choice.deferred) == (ROUTED, False)
    assert choice.reason == "deferral would need 128.0 MiB more, allowed 20.0"
    forced = choose_order(COSTLY, mutates_input=False, may_defer=True, must_defer=True)
    assert forced.deferred and "as asked for" in forced.reason


@pytest.mark.parametrize("order", list(Order))
def test_deferral_never_needs_more_than_one_output(order):
    """Where the rows cost more than that, the shared experts may run first."""
    for top_k in (1, 2, 8):
        for width in (1, 64, 4096):
            for shared_width in (0, 100, 10000, 100000):
                shape = BlockShape(64, top_k, 512, width, shared_width, 2)
                more = min(shape.peak_bytes(o, True) for o in Order) - shape.peak_bytes(
                    order, False
                )
                assert more <= shape.output_bytes


def test_slack():
    for slack, deferred in ((128 * MIB, True), (128 * MIB - 1, False)):
        choice = choose_order(COSTLY, mutates_input=False, may_defer=True, slack_bytes=slack)
        assert choice.deferred is deferred
    assert SLACK_BYTES == 20 * MIB
    few = COSTLY._replace(num_tokens=2560)  # 2560 x 4096 bfloat16: 20 MiB
    assert choose_order(few, mutates_input=False, may_defer=True).deferred
    few = COSTLY._replace(num_tokens=2561)
    assert not choose_order(few, mutates_input=False, may_defer=True).deferred


@pytest.mark.parametrize("may_defer", [True, False])
@pytest.mark.parametrize("shape", [TINY, DEEPSEEK_V3, TINY._replace(shared_width=500)])
def test_a_runner_that_overwrites_its_input_leaves_one_order(shape, may_defer):
    choice = choose_order(shape, mutates_input=True, may_defer=may_defer)
    assert choice.order is SHARED and choice.deferred is may_defer
    assert {p.order for p in choice.peaks} == {SHARED}


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("shared_width", [0, 96, 100000])
@pytest.mark.parametrize("may_defer", [True, False])
def test_the_chosen_way_is_the_lowest_but_for_the_slack(top_k, shared_width, may_defer):
    shape = BlockShape(512, top_k, 64, 32, shared_width, 2)
    choice = choose_order(shape, mutates_input=False, may_defer=may_defer, slack_bytes=100)
    chosen = shape.peak_bytes(choice.order, choice.deferred)
    assert chosen <= min(p.bytes for p in choice.peaks) + 100
    assert (
        choice.deferred
        or not may_defer
        or chosen < min(p.bytes for p in choice.peaks if p.deferred)
    )


def test_width_of_shared_experts():
    assert shared_width_of([tuple(p.shape) for p in Mlp(32, 48).parameters()], 32) == 3 * 48
    assert shared_width_of([(96, 32), (32, 48), (32,)], 32) == 96 + 48  # gate and up in one
    assert shared_width_of([(32, 32)], 32) == 64  # cannot be told; counts twice
    assert shared_width_of([], 32) == 0
    with torch.no_grad():
        block = logged_block(FakeRunner([]))
        block(make_input(4))
        assert block.last_plan.memory is not None and block._known_width[1] == 3 * 16


@torch.no_grad()
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("widths", [(448, 128, 8, 128), (64, 32, 1, 512)])
def test_the_model_tells_what_a_call_really_holds(monkeypatch, order, deferred, widths):
    hidden, width, top_k, shared_width = widths
    kind = {"dtype": torch.bfloat16}
    block = SharedExpertMoEBlock(
        TopKGate(hidden, 16, top_k, **kind),
        make_layer(hidden=hidden, width=width, experts=16, **kind),
        Mlp(hidden, shared_width, **kind),
    )
    x = make_input(256, hidden, **kind)
    monkeypatch.setattr(block_module, "make_plan", block_module.make_plan.__wrapped__)
    monkeypatch.setattr(
        "sgl_moe_jit.moe.block_gates.choose_order",
        lambda shape, **kwargs: OrderChoice(order, deferred, "for this test", ()),
    )
    block(x)
    with LiveBytes() as counted:
        block(x)
    shape = BlockShape(256, top_k, hidden, width, 3 * shared_width, 2)
    predicted = shape.peak_bytes(order, deferred) - shape.output_bytes
    # besides: index, weights and offsets of each slot, and the router's logits
    small = 256 * (top_k * 32 + 16 * 8)
    assert abs(counted.peak - predicted) <= small + 0.02 * predicted
