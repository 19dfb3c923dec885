# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The ends of what experts take: float16's range, odd widths, one expert with all tokens."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runners import create_runner
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.moe.runner_cases import assert_close, make_input, make_weights

field_report = pytest.mark.field_report
F16 = torch.float16


@field_report("A15")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(("weight", "factor", "want"), [(0.01, 1.0, 1000.0), (0.001, 16.0, 1600.0)])
@torch.no_grad()
def test_a_row_beyond_float16_whose_weighted_sum_is_within(bias, defer, weight, factor, want):
    up, down = torch.zeros(2, 2, 8, dtype=F16), torch.full((2, 8, 1), 1000.0, dtype=F16)
    up[:, 0, 0] = up[:, 1, 0] = 1.0
    zeros = torch.zeros(2, 8, dtype=F16) if bias else None
    weights = ExpertWeights(up, down, lambda x: 100 * x[:, 1:], down_bias=zeros)
    x = torch.ones(1, 8, dtype=F16)  # 100 after the activation, 1e5 after the second projection
    choice = StandardTopKOutput(torch.full((1, 1), weight), torch.ones(1, 1, dtype=int), factor)
    got = create_runner("auto", weights).run(x, choice, defer=defer)
    assert got.dtype == F16
    torch.testing.assert_close(got.float(), torch.full((1, 8), want), rtol=2**-11, atol=0)


@field_report("A13")
@pytest.mark.parametrize("hidden", [8, 9, 1025])
@pytest.mark.parametrize("width", [8, 9, 1025])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_any_width_and_one_expert_with_all_tokens(hidden, width, is_transposed):
    weights = make_weights(hidden=hidden, width=width, is_transposed=is_transposed)
    runner, x = create_runner("auto", weights), make_input(4, hidden)
    ids = torch.tensor([[3, -1]]).expand(4, 2).contiguous()
    topk = StandardTopKOutput(torch.full((4, 2), 0.5), ids)
    assert_close(runner.run(x, topk, defer=False), weights, x, topk, None)
    none = StandardTopKOutput(torch.ones(0, 2), ids[:0])
    leaf = x[:0].clone().requires_grad_()
    runner.run(leaf, none, defer=False).sum().backward()
    assert leaf.grad.shape == (0, hidden)
