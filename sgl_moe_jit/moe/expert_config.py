# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What an expert computes between its projections, and what the shared experts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationKind = Literal["silu", "swiglu_oai", "situ", "gelu_tanh", "relu2"]
Clamp = Literal["before", "after"]


@dataclass(frozen=True)
class ActivationConfig:
    """What lies between an expert's two projections.

    g and u are gate and up halves, L the limit.

    Attributes:
        kind: ``silu``: ``silu(g) * u``. ``swiglu_oai``: ``g * sigmoid(alpha * g) * (u + 1)``.
            ``situ``: ``beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)``.
            ``gelu_tanh``: GELU's tanh form of g, times u. ``relu2``: ``relu(u)^2``, without a gate.
        is_gated: Whether there is a gate.
        limit: L, or None: nothing is clamped.
        clamp: What L clamps. ``before``: g from above, u on both sides, then ``kind``. ``after``:
            ``min(silu(g), L)`` times u clamped on both sides. None where ``limit`` is None.
        alpha: Of ``swiglu_oai``.
        beta: Of ``situ``.
        linear_beta: Of ``situ``.
    """

    kind: ActivationKind
    is_gated: bool = True
    limit: float | None = None
    clamp: Clamp | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None


@dataclass(frozen=True)
class SharedExpertsConfig:
    """The experts that every token passes.

    Attributes:
        count: How many, as one MLP.
        intermediate_dim: Width of that MLP, all of them together.
        is_gated: Whether a sigmoid gate on the block's input scales their output.
        activation: Theirs; limits may differ from the routed experts'.
        quantization: Format of their weights, None: not quantized.
    """

    count: int
    intermediate_dim: int
    is_gated: bool
    activation: ActivationConfig
    quantization: str | None = None
