# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers blocks cut into ranks and dispatched: the stock block's output in float64."""

import copy
import functools

import pytest
import torch

from sgl_moe_jit import FusedMoE, SharedExpertMoEBlock
from sgl_moe_jit.ep import EpLayout, logical_to_physical_table, to_physical
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.ep.test_fused_block import FACTOR, counted, stock_block
from tests.ep.thread_ranks import all_ranks
from tests.integrations.tiny_models import BLOCK_ROUNDINGS, EXPERTS, HIDDEN, WIDTH, assert_close

field_report = pytest.mark.field_report


@field_report("E8")
@pytest.mark.parametrize(
    ("num_shared", "sum_at", "later"),
    [(1, "source", True), (2, "source", False), (2, "experts", True)],
)
def test_a_stock_block_over_ranks(monkeypatch, num_shared, sum_at, later):
    """Three ranks with a replica of one expert, one rank without tokens."""
    layout = EpLayout(EXPERTS, 1, 3, num_shared)
    stocks = [stock_block("deepseek_v3", num_shared) for _ in range(3)]
    slices = {
        (rank, fused): FusedMoE.from_transformers(stocks[rank], rank, 3, fused, num_redundant=1)
        for rank in range(3)
        for fused in (True, False)
    }
    table = logical_to_physical_table(layout)
    inputs = [torch.randn(count, HIDDEN) for count in (9, 0, 4)]
    exact = copy.deepcopy(stocks[0]).double()
    want = [exact(x.double()[None])[0].detach() for x in inputs]
    recorded = [None] * 3

    def gate_of(stock):
        def gate(x):
            _, weights, ids = stock.gate(x)
            if later:
                return StandardTopKOutput(weights / FACTOR, ids, FACTOR)
            return StandardTopKOutput(weights, ids)

        return gate

    def call(group):
        rank = group.rank()
        stock, x = stocks[rank], inputs[rank]
        outputs = []
        for fused in (True, False):
            experts = slices[rank, fused]
            path = ExpertParallelPath(
                TorchDispatcher(group, experts.num_local_experts, sum_at=sum_at),
                HomeExpander(layout, rank) if fused else None,
                functools.partial(to_physical, table=table),
                lambda ids: recorded.__setitem__(rank, ids.clone()),
            )
            block = SharedExpertMoEBlock(
                gate_of(stock), experts, stock.shared_experts, shared_is_fused=fused
            )
            outputs.append(block.forward_deepep(x, path))
            assert len(calls[rank]) == (0 if fused or not len(x) else 1)
        return outputs

    calls = [counted(stock) for stock in stocks]
    done, _ = all_ranks(monkeypatch, 3, call)
    for x, expected, outputs, ids in zip(inputs, want, done, recorded, strict=True):
        assert ids.shape[0] == len(x) and (ids < layout.num_physical).all()
        for output in outputs:
            # shared slots sum up apart, ranks' parts are rounded before they meet
            roundings = BLOCK_ROUNDINGS + num_shared * WIDTH + 3
            assert_close(output, expected.float(), roundings, "over ranks")
