# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which of FlashInfer's routing methods computes a family's routing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk import BypassedTopKOutput


class RoutingMethod(enum.IntEnum):
    """FlashInfer's ``RoutingMethodType``, where its number is the same from 0.6.15 to 0.7.4."""

    DEFAULT = 0
    """softmax, then top-k."""
    RENORMALIZE = 1
    """top-k, then softmax. Also passed along with ids that come ready, where none is used."""
    DEEPSEEK_V3 = 2
    """sigmoid, bias, groups, top-k, renormalize, factor."""
    RENORMALIZE_NAIVE = 4
    """softmax, top-k, renormalize."""
    SIGMOID_RENORM = 6
    """sigmoid, top-k, renormalize."""
    SIGMOID = 8
    """sigmoid, top-k."""


# The kernels add 1e-20 to the sum. What is as small does not reach a bfloat16 weight.
_MAX_EPSILON = 1e-12


@dataclass(frozen=True)
class RoutingChoice:
    """A routing method, or why there is none.

    Attributes:
        method: FlashInfer's; None: route outside its kernel.
        why: What the kernels lack.
        applies_factor: Whether the weights that come back hold the factor. Only the DeepSeek
            kernel does so (flashinfer#3499); elsewhere the factor stays due.
    """

    method: RoutingMethod | None
    why: str = ""

    @property
    def applies_factor(self) -> bool:
        """Whether the weights that come back hold ``routed_scaling_factor``."""
        return self.method is RoutingMethod.DEEPSEEK_V3


def _method(config: RouterConfig) -> RoutingMethod | str:
    """Return the method of a family, or what is missing."""
    if config.has_expert_scale or config.weight_on_input:
        return "a factor for each expert, or weights on the input"
    if config.renormalize and config.renormalize_epsilon > _MAX_EPSILON:
        return f"renormalize_epsilon {config.renormalize_epsilon}"
    has_groups = config.limits_groups
    if config.score_function == "softmax":
        if has_groups or config.has_correction_bias:
            return "softmax with groups or a correction bias"
        if config.score_after_top_k:
            return RoutingMethod.RENORMALIZE
        return RoutingMethod.RENORMALIZE_NAIVE if config.renormalize else RoutingMethod.DEFAULT
    if config.score_function != "sigmoid" or config.score_after_top_k:
        return f"{config.score_function}, score_after_top_k={config.score_after_top_k}"
    if has_groups or config.has_correction_bias:
        if not (config.renormalize and config.has_correction_bias):
            return "groups or a correction bias without the other steps of DeepSeek-V3"
        if has_groups and config.group_rule != "top2_sum":
            return f"group_rule {config.group_rule}"
        return RoutingMethod.DEEPSEEK_V3
    return RoutingMethod.SIGMOID_RENORM if config.renormalize else RoutingMethod.SIGMOID


def choose_method(output: BypassedTopKOutput) -> RoutingChoice:
    """Say which method routes these logits, with FlashInfer's rules for ties and NaN."""
    config = output.router_config
    method = _method(config)
    if isinstance(method, str):
        return RoutingChoice(None, f"no routing kernel for {method}")
    if output.num_token_non_padded is not None:
        return RoutingChoice(None, "the routing kernels know no padded tokens")
    if config.scores_dtype == "logits" and output.router_logits.dtype != torch.float32:
        return RoutingChoice(None, "the routing kernels do not round scores to the logits' dtype")
    return RoutingChoice(method)


def logits_arguments(
    output: BypassedTopKOutput, method: RoutingMethod
) -> dict[str, Tensor | int | float | None]:
    """Return the arguments by which FlashInfer's kernel routes.

    Raises:
        ValueError: the logits are not [T, E of the router].
    """
    config, logits = output.router_config, output.router_logits
    if logits.dim() != 2 or logits.shape[1] != config.num_experts:
        raise ValueError(
            f"router_logits: expected [num_tokens, {config.num_experts}], got {tuple(logits.shape)}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    is_deepseek = method is RoutingMethod.DEEPSEEK_V3
    return {
        "routing_logits": logits.contiguous(),
        "routing_bias": output.correction_bias,
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "n_group": config.n_group if is_deepseek else None,
        "topk_group": config.topk_group if is_deepseek else None,
        "routed_scaling_factor": config.routed_scaling_factor if is_deepseek else None,
        "routing_method_type": int(method),
    }
