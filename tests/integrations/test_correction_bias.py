# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A transformers router in a block of this library keeps its correction bias in float32."""

from __future__ import annotations

import copy

import pytest
import torch

from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse
from sgl_moe_jit.integrations.transformers import load_block, unfuse_shared_experts

from .tiny_models import EXPERTS, HIDDEN, last_block

CONVERSIONS = {
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.bfloat16),
    "parent": lambda m: torch.nn.Sequential(torch.nn.Sequential(m)).bfloat16()[0][0],
    "copy": lambda m: copy.deepcopy(m.bfloat16()),
}


def _fused(block):
    assert fuse(block).fused
    return block


@pytest.mark.field_report("A2")
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("make", [_fused, load_block])
@torch.no_grad()
def test_conversions_do_not_round_it(make, conversion):
    # GLM-5.2's biases lie here, where bfloat16 has nine values.
    biases = torch.linspace(6.817, 7.063, EXPERTS)
    stock = last_block("glm4_moe")
    stock.gate.e_score_correction_bias.copy_(biases)
    block = CONVERSIONS[conversion](make(stock))
    kept = block.gate.e_score_correction_bias
    assert kept.dtype == torch.float32 and torch.equal(kept, biases)
    assert block.experts.down_proj.dtype == block.gate.weight.dtype != torch.float32
    x = torch.randn(1, 3, HIDDEN).to(block.gate.weight.dtype)
    assert block(x).dtype == x.dtype
    fresh = make(last_block("glm4_moe").bfloat16())
    fresh.load_state_dict(block.state_dict(), assign=True)
    assert torch.equal(fresh.gate.e_score_correction_bias, biases)
    if make is _fused:
        unfuse_shared_experts(block)
        assert block.bfloat16().gate.e_score_correction_bias.dtype == torch.bfloat16
