# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Layers, routings and the float64 oracle of the runner tests."""

import pytest
import torch

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.topk import StandardTopKOutput

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RUNNERS = ["native", "grouped_mm"]
BF16, F32 = torch.bfloat16, torch.float32
NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 6, 32, 16, 3


def silu_halves(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_interleaved(x):
    return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]


class RowNorm(torch.nn.Module):
    def __init__(self, hidden, dtype, device):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.linspace(0.5, 1.5, hidden, device=device).to(dtype), requires_grad=False
        )

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()).to(
            x.dtype
        ) * self.weight.to(x.dtype)


def make_weights(
    *,
    num_experts=NUM_EXPERTS,
    hidden=HIDDEN,
    width=WIDTH,
    dtype=F32,
    device="cpu",
    is_transposed=False,
    interleaved=False,
    has_gate=True,
    bias=False,
    norm=False,
):
    generator = torch.Generator().manual_seed(11)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    up_width = 2 * width if has_gate else width
    up, down = random(num_experts, up_width, hidden), random(num_experts, hidden, width)
    up, down = up * hidden**-0.5, down * width**-0.5
    if is_transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    if not has_gate:
        activation = torch.nn.functional.silu
    else:
        activation = silu_interleaved if interleaved else silu_halves
    return ExpertWeights(
        up=up.to(device, dtype),
        down=down.to(device, dtype),
        activation=activation,
        is_transposed=is_transposed,
        has_gate=has_gate,
        up_bias=random(num_experts, up_width).to(device, dtype) if bias else None,
        down_bias=random(num_experts, hidden).to(device, dtype) if bias else None,
        post_expert_norm=RowNorm(hidden, dtype, device) if norm else None,
        is_silu_and_mul=activation is silu_halves,
    )


def make_input(num_tokens, hidden=HIDDEN, *, dtype=F32, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)


def make_topk(num_tokens, *, factor=1.0, absent=0.2, device="cpu", seed=2):
    generator = torch.Generator().manual_seed(seed)
    # expert 0 gets no token: an empty group in front, and more where chance has it
    ids = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator).argsort(1)[:, :TOP_K] + 1
    gone = torch.rand(ids.shape, generator=generator)
    ids[gone < absent] = NUM_EXPERTS
    ids[gone < absent / 2] = -1
    weights = torch.rand(ids.shape, generator=generator)
    return StandardTopKOutput(weights.to(device), ids.to(device), factor)


def oracle(weights, x, topk, shared=None, absolute=False):
    """One slot at a time in float64. ``absolute``: every term by its magnitude, for tolerances."""
    up, down = weights.up_as_input_major().double(), weights.down_as_input_major().double()
    out = []
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for k in range(topk.topk_ids.shape[1]):
            expert = int(topk.topk_ids[token, k])
            if not 0 <= expert < up.shape[0]:
                continue
            hidden = x[token].double() @ up[expert]
            if weights.up_bias is not None:
                hidden = hidden + weights.up_bias[expert].double()
            row = weights.activation(hidden[None])[0] @ down[expert]
            if weights.down_bias is not None:
                row = row + weights.down_bias[expert].double()
            if weights.post_expert_norm is not None:
                row = weights.post_expert_norm(row[None])[0]
            term = topk.topk_weights[token, k].double() * row
            total = total + (term.abs() if absolute else term)
        total = topk.routed_scaling_factor * total
        if shared is not None:
            total = total + (shared[token].double().abs() if absolute else shared[token].double())
        out.append(total)
    return torch.stack(out) if out else x.double()


def assert_close(got, weights, x, topk, shared):
    """Against the oracle.

    The routed part passes four roundings to the weights' dtype (first projection, activation
    twice, second projection), each seen through a dot product of up to 64 terms: 16 roundings of
    a typical row's size in all bound it generously, and 1e3 times less than one missing expert.
    Finished without deferral, the shared row is added to a sum that was rounded: once more each.
    """
    rounding = 2.0**-8 if weights.up.dtype == BF16 else 2.0**-24 * 16
    want = oracle(weights, x, topk, shared)
    routed = oracle(weights, x, topk, None, absolute=True)
    scale = torch.maximum(routed, routed.mean(dim=1, keepdim=True)) + 1
    allowed = rounding * (8 * scale * topk.routed_scaling_factor + want.abs())
    error = (got.double() - want).abs()
    bad = (error > allowed).nonzero()
    worst = int((error / allowed).argmax())
    assert bad.numel() == 0, (
        f"{tuple(got.shape)} {got.dtype}: {len(bad)} of {got.numel()} beyond; "
        f"worst at flat {worst}: got {got.reshape(-1)[worst]}, expected {want.reshape(-1)[worst]}, "
        f"error {error.reshape(-1)[worst]:.3g}, allowed {allowed.reshape(-1)[worst]:.3g}"
    )
