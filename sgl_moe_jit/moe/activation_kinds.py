# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations between an expert's two projections, named by what is clamped and where.

Models write "SwiGLU with a limit" and mean three things. With gate g, up u and limit L:

(a) ``SwiGluOai`` (gpt-oss, MiniMax-M3): g' = min(g, L), u' = clamp(u, -L, L), then
    g' * sigmoid(alpha * g') * (u' + 1).
(b) ``SwiGlu(limit=L)`` (DeepSeek-V4, GLM-5, Hunyuan-4): g' and u' as in (a), then silu(g') * u'.
(c) ``SwiGlu(limit=L, clamp="after")`` (Ling-3, Step-3.7): min(silu(g), L) * u'.

None of them clamps the gate from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from sgl_moe_jit.moe.expert_config import ActivationConfig

Kind = TypeVar("Kind", bound="GatedActivation")


def _limit(value: float | None) -> float | None:
    """Return a clamp's bound, or None for no clamp: None, 0 and inf all mean that in configs.

    Raises:
        ValueError: negative or NaN.
    """
    if value is None or value == 0 or value == math.inf:
        return None
    if not value > 0:
        raise ValueError(
            f"limit: expected a positive number, or None, 0 or inf for none; got {value}"
        )
    return float(value)


@dataclass(frozen=True)
class GatedActivation:
    """From the first projection's output [N, 2I] to [N, I], in the input's dtype.

    Attributes:
        is_concatenated: Whether the input holds gate and up as halves; else they alternate, gate
            first.
    """

    is_concatenated: bool = True

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up, [N, I] each (views)."""
        if self.is_concatenated:
            gate, up = x.chunk(2, dim=-1)
            return gate, up
        return x[..., ::2], x[..., 1::2]

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of gate and up, [N, I] each."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation [N, I] of a projection's output [N, 2I]."""
        return self.combine(*self.split(x))

    def laid_out(self: Kind, is_concatenated: bool) -> Kind:
        """Return this activation for the declared layout."""
        return replace(self, is_concatenated=is_concatenated)


@dataclass(frozen=True)
class SwiGlu(GatedActivation):
    """``silu(gate) * up``, with or without a limit: (b) and (c) of this module.

    Attributes:
        limit: L. None, 0 and inf: no clamp.
        clamp: Clamp the gate ``before`` SiLU or its result ``after`` it; ``up`` in both cases.
    """

    limit: float | None = None
    clamp: Literal["before", "after"] = "before"

    def __post_init__(self) -> None:
        """Refuse what no model means.

        Raises:
            ValueError: names the field, what was expected and what came.
        """
        if self.clamp not in ("before", "after"):
            raise ValueError(f"clamp: expected 'before' or 'after', got {self.clamp!r}")
        _limit(self.limit)

    @property
    def is_silu_and_mul(self) -> bool:
        """Whether this is exactly ``silu(first half) * second half``."""
        return self.is_concatenated and _limit(self.limit) is None

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :class:`GatedActivation`."""
        limit = _limit(self.limit)
        if limit is None:
            return torch.nn.functional.silu(gate) * up
        if self.clamp == "before":
            gate = torch.nn.functional.silu(gate.clamp(max=limit))
        else:
            gate = torch.nn.functional.silu(gate).clamp(max=limit)
        return gate * up.clamp(min=-limit, max=limit)


@dataclass(frozen=True)
class SwiGluOai(GatedActivation):
    """``gate * sigmoid(alpha * gate) * (up + 1)``, both clamped before: (a) of this module.

    gpt-oss stores gate and up alternating (``is_concatenated=False``), MiniMax-M3 as halves.

    Attributes:
        alpha: Factor inside the sigmoid.
        limit: L. None, 0 and inf: no clamp.
    """

    alpha: float = 1.702
    limit: float | None = 7.0

    def __post_init__(self) -> None:
        """Refuse a limit that bounds nothing. Raises ValueError."""
        _limit(self.limit)

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :class:`GatedActivation`."""
        limit = _limit(self.limit)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


@dataclass(frozen=True)
class Glu(GatedActivation):
    """``function(gate) * up``, for any other gated unit (GEGLU).

    Attributes:
        function: Elementwise; a module-level function or a module, so that it can be pickled.
    """

    function: Callable[[Tensor], Tensor] = torch.nn.functional.gelu

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :class:`GatedActivation`."""
        return self.function(gate) * up


@dataclass(frozen=True)
class GeluTanhGlu(GatedActivation):
    """``gelu(gate) * up`` in GELU's tanh form (Gemma)."""

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :class:`GatedActivation`."""
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True)
class SiTu(GatedActivation):
    """``beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)``.

    Kimi-K3's.

    Attributes:
        beta: Bound of the gate's linear part.
        linear_beta: Bound of ``up``.
    """

    beta: float = 4.0
    linear_beta: float = 25.0

    def combine(self, gate: Tensor, up: Tensor) -> Tensor:
        """See :class:`GatedActivation`."""
        gate = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
        return gate * (self.linear_beta * torch.tanh(up / self.linear_beta))


@dataclass(frozen=True)
class Relu2:
    """``relu(x)^2`` of experts without a gate (Nemotron-H): [N, I] to [N, I]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of [N, I]."""
        return torch.nn.functional.relu(x).square()


def activation_of(
    config: ActivationConfig, *, is_concatenated: bool = True
) -> Callable[[Tensor], Tensor]:
    """Return the callable of a model's declared activation.

    Args:
        config: From :class:`sgl_moe_jit.MoEConfig`.
        is_concatenated: Whether the weights hold gate and up as halves.

    Raises:
        ValueError: a combination no model has; names the fields.
    """
    if config.kind == "relu2" and not config.is_gated and config.limit is None:
        return Relu2()
    if config.is_gated:
        if config.kind == "silu":
            return SwiGlu(is_concatenated, config.limit, config.clamp or "before")
        if config.kind == "swiglu_oai" and config.clamp != "after":
            alpha = 1.702 if config.alpha is None else config.alpha
            return SwiGluOai(is_concatenated, alpha, config.limit)
        if config.limit is None and config.kind == "gelu_tanh":
            return GeluTanhGlu(is_concatenated)
        if config.limit is None and config.kind == "situ":
            if config.beta is None or config.linear_beta is None:
                raise ValueError(f"beta, linear_beta: expected numbers, got {config}")
            return SiTu(is_concatenated, config.beta, config.linear_beta)
    raise ValueError(f"activation: expected a combination that a model has, got {config}")
