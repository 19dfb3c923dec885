# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How one model family chooses experts from router logits, and weighs them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, get_args

from sgl_moe_jit.ops.route_topk import SCORE_FUNCTIONS, RouteFlag, RouteOptions

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupRule = Literal["top2_sum", "max"]
EpsilonKind = Literal["add", "clamp"]
LogitsDType = Literal["float32", "model"]
ScoresDType = Literal["float32", "logits"]
WeightsDType = Literal["float32", "logits", "hidden"]

_CHOICES = {
    "score_function": get_args(ScoreFunction),
    "group_rule": get_args(GroupRule),
    "epsilon_kind": get_args(EpsilonKind),
    "logits_dtype": get_args(LogitsDType),
    "scores_dtype": get_args(ScoresDType),
    "weights_dtype": get_args(WeightsDType),
}


@dataclass(frozen=True)
class RouterConfig:
    """A family's routing, as its reference implementation computes it.

    Scores are ``score_function(logits)``. The K experts with the largest choice value (score plus
    correction bias, in the best groups) are taken; their weights are the scores, without the bias,
    then divided by their sum and multiplied by the factor, where the family does so.

    Attributes:
        num_experts: Columns of the logits: routed experts and zero ("identity") experts.
        top_k: K, experts a token.
        score_function: ``softmax``, ``sigmoid`` or ``sqrtsoftplus`` (``sqrt(softplus(x))``).
        score_after_top_k: Choose on the logits, and apply the score function to the K chosen ones
            only. A softmax then sums to one over K.
        has_correction_bias: Whether a bias that steers the choice, not the weights, must be given.
        n_group: Groups of consecutive experts; 1: none.
        topk_group: Groups a token may choose from.
        group_rule: A group's own score: the sum of its two best choice values, or its best.
        renormalize: Divide the K weights by their sum.
        renormalize_epsilon: See ``epsilon_kind``; 0: none.
        epsilon_kind: ``add`` the epsilon to the sum, or ``clamp`` the sum from below.
        routed_scaling_factor: Factor on the routed sum.
        scale_in_weights: Who owns the factor: True multiplies the weights by it, False records it
            on the output (``StandardTopKOutput.routed_scaling_factor``) for whoever finishes the
            sum. Never both.
        logits_dtype: Dtype of the gate's GEMM: ``float32``, or ``model``: that of its weight.
        scores_dtype: Dtype that each step after the logits is rounded to: ``float32``, or that of
            the logits. Divisions are done in float32 in any case.
        weights_dtype: Of the weights returned: ``float32``, that of the ``logits``, or that of the
            ``hidden`` states where these are given.
        weight_on_input: The weight multiplies the expert's input, not its output. K must be 1.
        has_expert_scale: Whether a factor for each expert must be given, applied to its weight.
    """

    num_experts: int
    top_k: int
    score_function: ScoreFunction
    score_after_top_k: bool = False
    has_correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    group_rule: GroupRule = "top2_sum"
    renormalize: bool = False
    renormalize_epsilon: float = 0.0
    epsilon_kind: EpsilonKind = "add"
    routed_scaling_factor: float = 1.0
    scale_in_weights: bool = True
    logits_dtype: LogitsDType = "float32"
    scores_dtype: ScoresDType = "float32"
    weights_dtype: WeightsDType = "float32"
    weight_on_input: bool = False
    has_expert_scale: bool = False

    @property
    def due_scaling_factor(self) -> float:
        """Factor that the weights do not hold and whoever finishes the sum has to apply."""
        return 1.0 if self.scale_in_weights else self.routed_scaling_factor

    @property
    def limits_groups(self) -> bool:
        """Whether some groups are closed to a token."""
        return self.topk_group < self.n_group

    @cached_property
    def kernel_options(self) -> RouteOptions:
        """The same as the routing kernel takes it."""
        flags = (
            RouteFlag.SCORE_AFTER_TOP_K * self.score_after_top_k
            + RouteFlag.ROUND_SCORES * (self.scores_dtype == "logits")
            + RouteFlag.RENORMALIZE * self.renormalize
            + RouteFlag.CLAMP_EPSILON * (self.epsilon_kind == "clamp")
            + RouteFlag.GROUP_BY_MAX * (self.group_rule == "max")
        )
        return RouteOptions(
            self.num_experts,
            self.top_k,
            SCORE_FUNCTIONS.index(self.score_function),
            int(flags),
            self.n_group if self.limits_groups else 1,
            self.topk_group if self.limits_groups else 1,
            float(self.renormalize_epsilon),
            float(self.routed_scaling_factor if self.scale_in_weights else 1.0),
        )

    def __post_init__(self) -> None:
        """Refuse what no family means.

        Raises:
            TypeError, ValueError: names the field, what was expected and what came.
        """
        for name in ("num_experts", "top_k", "n_group", "topk_group"):
            self._check_count(name)
        for field in fields(self):
            value = getattr(self, field.name)
            choices = _CHOICES.get(field.name)
            if choices is not None and value not in choices:
                raise ValueError(f"{field.name}: expected one of {choices}, got {value!r}")
        if self.num_experts % self.n_group:
            raise ValueError(
                f"n_group: expected a divisor of num_experts {self.num_experts}, got {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group: expected at most {self.n_group}, got {self.topk_group}")
        reachable = self.num_experts // self.n_group * self.topk_group
        if self.top_k > reachable:
            raise ValueError(
                f"top_k: expected at most {reachable}, the experts in {self.topk_group} of "
                f"{self.n_group} groups, got {self.top_k}"
            )
        if self.weight_on_input and self.top_k != 1:
            raise ValueError(
                f"top_k: expected 1, since weight_on_input scales a token once, got {self.top_k}"
            )
        if self.score_after_top_k and (self.has_correction_bias or self.n_group > 1):
            raise ValueError(
                "score_after_top_k: chooses on the logits alone; expected neither a correction "
                f"bias nor groups, got has_correction_bias={self.has_correction_bias}, "
                f"n_group={self.n_group}"
            )
        if not (math.isfinite(self.renormalize_epsilon) and self.renormalize_epsilon >= 0):
            raise ValueError(
                f"renormalize_epsilon: expected 0 or more, got {self.renormalize_epsilon}"
            )
        if not math.isfinite(self.routed_scaling_factor) or self.routed_scaling_factor == 0:
            raise ValueError(
                "routed_scaling_factor: expected a finite factor, 1.0 for none, got "
                f"{self.routed_scaling_factor}"
            )

    def _check_count(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value}")
