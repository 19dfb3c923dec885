# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The routing kernel: which calls it serves, and what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.jit import CudaArch
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.ops import route_topk
from tests.moe.routing_cases import CONFIGS, E, K, config

V3 = CONFIGS["sigmoid_groups"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def on_any_device(monkeypatch):
    """Ask as on CUDA, so that all else that decides can be seen without one."""
    monkeypatch.setattr(route_topk, "is_cuda", lambda x: True)


def refusal(logits=None, routing=V3, bias=None, scale=None, count=None, dtype=F32):
    logits = torch.zeros(3, E) if logits is None else logits
    return route_topk.refusal(logits, routing.kernel_options, bias, scale, count, dtype)


def test_the_cpu_stays_with_torch():
    assert refusal() == "on cpu"


def test_what_the_kernel_serves(on_any_device):
    for dtype in (F32, BF16, F16):
        assert refusal(torch.zeros(3, E, dtype=dtype)) == ""
        assert refusal(dtype=dtype, scale=torch.ones(E, dtype=dtype), bias=torch.zeros(E)) == ""
    for count in (2, torch.tensor(2), torch.ones(1, dtype=torch.int32)):
        assert refusal(count=count) == ""
    assert refusal(torch.zeros(3, 2 * E)[:, 1 : E + 1]) == ""
    assert refusal(torch.zeros(E).expand(3, E)) == ""
    assert refusal(torch.zeros(0, E)) == ""


def test_what_the_kernel_leaves_to_torch(on_any_device, monkeypatch):
    wide = config(num_experts=1025, top_k=2)
    assert refusal(torch.zeros(3, 1025), wide) == "1025 experts, top_k 2"
    many = config(num_experts=128, top_k=65)
    assert refusal(torch.zeros(3, 128), many) == "128 experts, top_k 65"
    groups = config(num_experts=128, top_k=2, n_group=64, topk_group=3)
    assert refusal(torch.zeros(3, 128), groups) == "64 groups"
    assert refusal(torch.zeros(3, 128), replace(groups, topk_group=64)) == ""  # none is closed
    assert "float64" in refusal(torch.zeros(3, E).double())
    assert "float64" in refusal(dtype=torch.float64)
    assert "strides (1, 3)" in refusal(torch.zeros(E, 3).t())
    assert "correction_bias is torch.float64" in refusal(bias=torch.zeros(E).double())
    assert "expert_scale is elsewhere, or not" in refusal(scale=torch.ones(2 * E)[::2])
    assert "num_token_non_padded is torch.int16" in refusal(count=torch.tensor(2).short())
    with torch.autograd.forward_ad.dual_level():
        assert refusal() != ""
    logits = torch.zeros(3, E, requires_grad=True)
    assert "gradients" in refusal(logits)
    with torch.no_grad():
        assert refusal(logits) == ""
    monkeypatch.setenv(env.ROUTING_KERNEL.name, "0")
    assert refusal() == "SGL_MOE_JIT_ROUTING_KERNEL is off"


def test_select_experts_asks_it(on_any_device, monkeypatch):
    """With every argument in its place; ids that are given are never chosen anew."""
    calls = []

    def kernel(*arguments):
        calls.append(arguments)
        return torch.zeros(3, K), torch.zeros(3, K, dtype=torch.int32)

    monkeypatch.setattr(route_topk, "route_topk", kernel)
    routing = replace(CONFIGS["softmax_expert_scale"], weights_dtype="hidden")
    logits, scale, count = torch.zeros(3, E), torch.ones(E), torch.tensor(2)
    output = select_experts(
        logits, routing, expert_scale=scale, num_token_non_padded=count, hidden_dtype=BF16
    )
    assert calls == [(logits, routing.kernel_options, None, scale, count, BF16)]
    assert output.num_experts == E
    select_experts(logits, CONFIGS["softmax"], topk_ids=torch.zeros(3, K).long())
    assert len(calls) == 1


def test_logits_that_no_module_serves():
    with pytest.raises(TypeError, match=r"^logits: expected float32, bfloat16 or float16, got"):
        route_topk.cuda_spec(torch.float64, CudaArch.parse("sm_90a"))


def test_the_options_of_a_family():
    assert V3.kernel_options == (E, K, 1, 4, 8, 4, 1e-20, 2.5)
    assert CONFIGS["softmax_groups"].kernel_options == (E, K, 0, 16, 8, 3, 0.0, 16.0)
    assert CONFIGS["softmax_bias_clamp"].kernel_options.flags == 4 + 8
    assert CONFIGS["sigmoid_top_1"].kernel_options == (E, 1, 1, 1, 1, 1, 0.0, 1.0)
    rounding = replace(CONFIGS["sqrtsoftplus"], scores_dtype="logits", scale_in_weights=False)
    assert rounding.kernel_options == (E, K, 2, 4 + 2, 1, 1, 1e-20, 1.0)
    assert replace(V3, topk_group=8).kernel_options.n_group == 1
