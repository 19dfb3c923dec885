# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The routers known here: by what their stock forward computes, not by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.moe.widen import to_float32
from sgl_moe_jit.ops.library import can_bypass_dispatcher


@dataclass(frozen=True)
class GateStyle:
    """One way to route, and what a stock forward of it must look like.

    Attributes:
        names: Every name that the forward refers to.
        in_float32: Whether logits are computed in float32; else in the weight's dtype.
        has_bias: Whether there is an ``e_score_correction_bias``.
        routing: From the router and its number of experts to its routing. Reads what the forward
            reads, so that a changed attribute counts from the next call on.
        cases: Values of these attributes that the forward is tried with.
    """

    names: frozenset[str]
    in_float32: bool
    has_bias: bool
    routing: Callable[[Any, int], RouterConfig]
    cases: tuple[dict[str, Any], ...]

    def logits(self, gate: Any, x: Tensor) -> Tensor:
        """Return the logits [T, E] by the stock forward's own expression, bit for bit."""
        if self.in_float32:
            flat = x.view(-1, gate.hidden_dim)
            wide = gate.weight.type(torch.float32)
            return torch.nn.functional.linear(to_float32(flat), wide)
        return torch.nn.functional.linear(x.reshape(-1, gate.hidden_dim), gate.weight)

    def bias(self, gate: Any) -> Tensor | None:
        """Return the correction bias."""
        return gate.e_score_correction_bias if self.has_bias else None


def _number(name: str, value: object) -> float:
    """Return a plain number. A tensor's value changes while it stays the same key of a cache."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


# Of arguments that compare equal, a router may take 2 and refuse 2.0.
_remembered = functools.lru_cache(maxsize=256, typed=True)


@_remembered
def _sigmoid(
    experts: int, top_k: int, groups: int, open_groups: int, renormalize: bool, factor: float
) -> RouterConfig:
    return RouterConfig(
        *(experts, top_k, "sigmoid"),
        has_correction_bias=True,
        n_group=groups,
        topk_group=open_groups,
        renormalize=bool(_number("norm_topk_prob", renormalize)),
        renormalize_epsilon=1e-20,
        routed_scaling_factor=float(_number("routed_scaling_factor", factor)),
    )


@_remembered
def _softmax_groups(
    experts: int, top_k: int, method: str, groups: int, open_groups: int, factor: float
) -> RouterConfig:
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method: {method!r} is not known")
    limited = method == "group_limited_greedy"
    return RouterConfig(
        *(experts, top_k, "softmax"),
        n_group=groups if limited else 1,
        topk_group=open_groups if limited else 1,
        group_rule="max",
        routed_scaling_factor=float(_number("routed_scaling_factor", factor)),
    )


@_remembered
def _softmax(experts: int, top_k: int, renormalize: bool) -> RouterConfig:
    return RouterConfig(
        *(experts, top_k, "softmax"),
        renormalize=bool(_number("norm_topk_prob", renormalize)),
        logits_dtype="model",
        weights_dtype="logits",
    )


_LINEAR = {"F", "linear", "torch", "weight", "hidden_dim", "top_k", "topk"}
_GROUPS = {"view", "type", "float32", "num_experts", "num_group", "topk_group", "zeros_like"}
_GROUPS |= {"scatter_", "unsqueeze", "expand", "reshape", "masked_fill", "bool"}
_GROUPS |= {"routed_scaling_factor"}
_QWEN = frozenset(
    {*_LINEAR, "reshape", "nn", "functional", "softmax", "float", "dtype", "to", "sum"}
)
_V3 = {"top_k": 3, "num_group": 4, "topk_group": 2, "norm_topk_prob": True}
_V2 = {"top_k": 3, "num_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
STYLES = (
    # DeepSeek-V3, Kimi-K2, GLM-4-MoE
    GateStyle(
        frozenset(
            {*_LINEAR, *_GROUPS, "e_score_correction_bias", "sigmoid", "gather", "sum", "float"}
            | {"norm_topk_prob"}
        ),
        in_float32=True,
        has_bias=True,
        routing=lambda gate, experts: _sigmoid(
            *(experts, gate.top_k, gate.num_group, gate.topk_group),
            *(gate.norm_topk_prob, gate.routed_scaling_factor),
        ),
        cases=(
            {**_V3, "routed_scaling_factor": 2.5},
            {**_V3, "routed_scaling_factor": 1.5, "norm_topk_prob": False, "top_k": 1},
        ),
    ),
    # DeepSeek-V2
    GateStyle(
        frozenset({*_LINEAR, *_GROUPS, "softmax", "topk_method", "max", "values"}),
        in_float32=True,
        has_bias=False,
        routing=lambda gate, experts: _softmax_groups(
            *(experts, gate.top_k, gate.topk_method, gate.num_group, gate.topk_group),
            gate.routed_scaling_factor,
        ),
        cases=({**_V2, "topk_method": "greedy"}, {**_V2, "topk_method": "group_limited_greedy"}),
    ),
    # Qwen2-MoE, Qwen3-MoE, OLMoE
    GateStyle(
        _QWEN | {"norm_topk_prob"},
        in_float32=False,
        has_bias=False,
        routing=lambda gate, experts: _softmax(experts, gate.top_k, gate.norm_topk_prob),
        cases=({"top_k": 3, "norm_topk_prob": True}, {"top_k": 2, "norm_topk_prob": False}),
    ),
    # Qwen3.5-MoE, Qwen3-VL-MoE
    GateStyle(
        _QWEN,
        in_float32=False,
        has_bias=False,
        routing=lambda gate, experts: _softmax(experts, gate.top_k, True),
        cases=({"top_k": 3},),
    ),
)


@functools.lru_cache(maxsize=256)
def style_of_gate(cls: Any, forward: Any) -> GateStyle | None:
    """Return the style of a router's class and forward; None where they are not known here.

    The names that its forward refers to must be a style's. Names say nothing about operators and
    constants, so it is also run once for each case, on the CPU, beside ``select_experts``.

    Raises:
        UnsupportedError: it is not known yet, and something traces or changes torch's operations,
            so that it cannot be run now.
    """
    code = getattr(forward, "__code__", None)
    if code is None or not cls.__module__.startswith("transformers.models."):
        return None
    if code.co_argcount != 2:
        return None
    for style in STYLES:
        if style.names == set(code.co_names):
            if not can_bypass_dispatcher():
                raise UnsupportedError("tracing, before a first call without")
            return style if all(_agrees(forward, style, case) for case in style.cases) else None
    return None


def _agrees(forward: Any, style: GateStyle, case: dict[str, Any]) -> bool:
    """Whether a forward chooses and weighs as a style does, small scores included."""
    hidden, experts = 4, 16
    numbers = torch.arange(1, 1 + experts * hidden + 6 * hidden, device="cpu").float().sin()
    weight, x = numbers.split((experts * hidden, 6 * hidden))
    weight, x = weight.view(experts, hidden).clone(), x.view(6, hidden) * 3
    # A sigmoid's scores of e-45 are about the epsilon of a sum, those of e-30 far above.
    weight[:, 0], x[4, 0], x[5, 0] = 1.0, -45.0, -30.0
    gate = SimpleNamespace(
        hidden_dim=hidden,
        num_experts=experts,
        weight=weight,
        e_score_correction_bias=numbers[:experts].cos(),
        **case,
    )
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            logits, weights, ids = forward(gate, x)
        except Exception:  # of any kind: it asks for something else
            return False
        mine = style.logits(gate, x)
        output = select_experts(mine, style.routing(gate, experts), style.bias(gate))
    order, my_order = ids.sort(-1), output.topk_ids.long().sort(-1)
    return (
        torch.equal(logits, mine)
        and torch.equal(order.values, my_order.values)
        and torch.allclose(
            weights.gather(-1, order.indices),
            output.topk_weights.gather(-1, my_order.indices),
            rtol=1e-5,
            atol=0,
        )
    )
