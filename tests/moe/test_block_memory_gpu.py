# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a long prefill on a GPU: each order, against the model and against each other."""

import pytest
import torch

from sgl_moe_jit.bench.memory import peak_bytes
from sgl_moe_jit.moe import block as block_module
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.shared_order import BlockShape, Order, OrderChoice
from tests.moe.layer_cases import Mlp, TopKGate, make_layer

pytestmark = pytest.mark.gpu
# DeepSeek-V3's widths, one rank's 32 experts, a prefill of 16384 tokens
TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 16384, 7168, 2048, 32, 8
SHAPE = BlockShape(TOKENS, TOP_K, HIDDEN, WIDTH, 3 * WIDTH, 2)
KIND = {"dtype": torch.bfloat16, "device": "cuda"}


@torch.no_grad()
def test_the_choice_saves_the_shared_output_and_the_model_is_right(monkeypatch):
    layer = make_layer(hidden=HIDDEN, width=WIDTH, experts=EXPERTS, **KIND)
    shared = Mlp(HIDDEN, WIDTH, **KIND)
    block = SharedExpertMoEBlock(TopKGate(HIDDEN, EXPERTS, TOP_K, **KIND), layer, shared)
    x = torch.randn(TOKENS, HIDDEN, **KIND)
    chosen = peak_bytes(lambda: block(x))
    assert block.last_plan.deferred and block.last_plan.order is Order.ROUTED_FIRST
    monkeypatch.setattr(block_module, "make_plan", block_module.make_plan.__wrapped__)
    found = {}
    for order in Order:
        for deferred in (True, False):
            monkeypatch.setattr(
                "sgl_moe_jit.moe.block_gates.choose_order",
                lambda shape, order=order, deferred=deferred, **kwargs: OrderChoice(
                    order, deferred, "for this test", ()
                ),
            )
            found[order, deferred] = peak_bytes(lambda: block(x))
            predicted = SHAPE.peak_bytes(order, deferred) - SHAPE.output_bytes
            assert abs(found[order, deferred] - predicted) <= 0.03 * predicted, (order, deferred)
    assert found[Order.SHARED_FIRST, False] - chosen >= 0.9 * SHAPE.output_bytes
    assert chosen <= 1.01 * min(found.values())
