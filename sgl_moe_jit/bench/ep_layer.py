# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The layer of ``bench ep``: each expert made from its own number, so that any rank can make any.

A rank holds its experts; the oracle, on any rank, makes those that its few tokens need, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.topk import StandardTopKOutput

FACTOR = 2.5  # DeepSeek-V3's routed scaling factor, due on the sum
_EXPERT_SEED, _GATE_SEED, _TOKEN_SEED = 1_000, 1, 500_000


@dataclass(frozen=True)
class EpCase:
    """One model's layer.

    Attributes:
        name: As in result files.
        hidden_dim: H.
        intermediate_dim: I, of a routed and of the one shared expert.
        num_experts: E.
        top_k: K.
    """

    name: str
    hidden_dim: int
    intermediate_dim: int
    num_experts: int
    top_k: int


CASES = {
    case.name: case
    for case in (
        EpCase("tiny", 256, 64, 32, 4),
        EpCase("deepseek-v3", 7168, 2048, 256, 8),
        EpCase("kimi-k2", 7168, 2048, 384, 8),
        EpCase("glm-4.5", 5120, 1536, 160, 8),
    )
}


@dataclass(frozen=True)
class EpLayer:
    """A case on a device.

    Attributes:
        case: Sizes.
        device: Where its tensors are.
        skew: Expert ``e`` is popular like ``(e + 1) ** -skew``.
    """

    case: EpCase
    device: torch.device
    skew: float

    def _draw(self, seed: int, *shape: int, scale: float) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(0, scale, generator=generator)

    def expert(self, number: int) -> tuple[Tensor, Tensor]:
        """Return w13 [2I, H] and w2 [H, I] of a routed expert, or of the shared one, E."""
        hidden, width = self.case.hidden_dim, self.case.intermediate_dim
        seed = _EXPERT_SEED + 2 * number
        up = self._draw(seed, 2 * width, hidden, scale=hidden**-0.5)
        return up, self._draw(seed + 1, hidden, width, scale=width**-0.5)

    def experts(self, layout: EpLayout, rank: int) -> FusedMoE:
        """Return one rank's slots, the shared one last."""
        numbers = layout.slot_sources(rank)
        ups, downs = zip(*(self.expert(number) for number in numbers), strict=True)
        return FusedMoE.from_w13_w2(torch.stack(ups), torch.stack(downs))

    def shared(self) -> Callable[[Tensor], Tensor]:
        """Return the shared expert as an MLP of its own."""
        up, down = self.expert(self.case.num_experts)

        def mlp(x: Tensor) -> Tensor:
            gate, linear = torch.nn.functional.linear(x, up).chunk(2, dim=-1)
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * linear, down)

        return mlp

    def gate(self) -> Callable[[Tensor], StandardTopKOutput]:
        """Return a softmax router whose experts are popular as ``skew`` says."""
        count = self.case.num_experts
        matrix = self._draw(_GATE_SEED, count, self.case.hidden_dim, scale=1.0).float()
        matrix *= self.case.hidden_dim**-0.5
        numbers = torch.arange(1, count + 1, dtype=torch.float32, device=self.device)
        popularity = -self.skew * numbers.log()

        def route(x: Tensor) -> StandardTopKOutput:
            scores = torch.softmax(x.float() @ matrix.t() + popularity, dim=-1)
            weights, ids = scores.topk(self.case.top_k)
            return StandardTopKOutput(weights / weights.sum(-1, keepdim=True), ids.int(), FACTOR)

        return route

    def tokens(self, rank: int, count: int) -> Tensor:
        """Return a rank's tokens [T, H]."""
        return self._draw(_TOKEN_SEED + rank, count, self.case.hidden_dim, scale=1.0)

    def oracle(self, x: Tensor, topk: StandardTopKOutput) -> Tensor:
        """Return the layer's output for a few tokens in float64, expert by expert, on no rank."""
        total = self._one(self.case.num_experts, x)  # the shared expert's row, once
        for number in topk.topk_ids.unique().tolist():
            token, slot = (topk.topk_ids == number).nonzero(as_tuple=True)
            scale = topk.routed_scaling_factor * topk.topk_weights[token, slot].double()
            total[token] += scale[:, None] * self._one(number, x[token])
        return total

    def _one(self, number: int, x: Tensor) -> Tensor:
        up, down = self.expert(number)
        gate, linear = (x.double() @ up.double().t()).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * linear) @ down.double().t()
