# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a loaded block beside transformers' own, in bytes counted on a CPU."""

from __future__ import annotations

import pytest
import torch
import transformers

from sgl_moe_jit.integrations.transformers.layer_loading import load_block
from sgl_moe_jit.moe.deferred import finalize_output
from tests.moe.layer_cases import LiveBytes

from .tiny_models import _COMMON, _DEEPSEEK

# DeepSeek-V3's widths by 16, K 8
HIDDEN, WIDTH, TOKENS = 448, 128, 256


def deepseek_block(scale=1, device="cpu"):
    settings = {
        **_COMMON,
        **_DEEPSEEK,
        **{"hidden_size": HIDDEN * scale, "moe_intermediate_size": WIDTH * scale},
        **{"n_routed_experts": 16, "topk_group": 2, "num_experts_per_tok": 8},
    }
    config = transformers.DeepseekV3Config(**settings)
    kind = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE
    with torch.device(device), torch.no_grad():
        module = kind(config).bfloat16()
        for p in module.parameters():
            p.normal_(0, 0.05)
    return module.eval()


def peak(call):
    call()
    with LiveBytes() as counted:
        call()
    return counted.peak


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_below_transformers(implementation):
    """Its ``eager`` holds less: one expert's rows at a time, and a synchronisation an expert."""
    stock = deepseek_block()
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16)
    ours = peak(lambda: load_block(stock)(x))
    stock.config._experts_implementation = implementation
    assert ours < peak(lambda: stock(x))


@torch.no_grad()
def test_not_above_either_order_of_the_engines():
    """Shared experts first, kept across the routed ones; or routed, finished, then shared."""
    stock = deepseek_block()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    block = load_block(stock)

    def shared_first():
        shared = block.shared_experts(x)
        return finalize_output(block.experts(x, block._route(x)), shared)

    def routed_first():
        routed = block.experts(x, block._route(x))
        return finalize_output(routed, block.shared_experts(x))

    ours = peak(lambda: block(x))
    one_output = TOKENS * HIDDEN * 2
    assert ours <= peak(shared_first) - 0.9 * one_output
    assert ours <= peak(routed_first)
    assert block.last_plan.deferred


@pytest.mark.gpu
@torch.no_grad()
def test_below_transformers_on_a_gpu():
    """DeepSeek-V3's widths, 16 experts, a prefill of 8192 tokens."""
    stock = deepseek_block(16, "cuda")
    x = torch.randn(1, 8192, 16 * HIDDEN, dtype=torch.bfloat16, device="cuda")
    block = load_block(stock)
    stock.config._experts_implementation = "grouped_mm"
    peaks = []
    for call in (block, stock):
        call(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < peaks[1]
