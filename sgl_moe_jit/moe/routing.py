# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The gate and the choice of experts: one function each, for every path."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.moe.autocast import autocast_off, is_autocast_on
from sgl_moe_jit.moe.input_checks import check_states
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.moe.topk_selection import select
from sgl_moe_jit.moe.widen import to_float32


def router_logits(
    hidden_states: Tensor,
    gate_weight: Tensor,
    router_config: RouterConfig,
    gate_bias: Tensor | None = None,
) -> Tensor:
    """Return the gate's logits, in the dtype that the family's reference uses.

    ``hidden_states @ gate_weight.T + gate_bias``. With ``logits_dtype="float32"`` both are widened
    first, also under autocast: a bfloat16 GEMM cannot get its bits back, and near ties flip
    experts. (``torch.backends.cuda.matmul.allow_tf32`` is the caller's and takes bits again.) With
    ``"model"`` it is the weight's dtype, or autocast's.

    Args:
        hidden_states: [..., H] floating.
        gate_weight: [E, H] floating.
        router_config: The family's.
        gate_bias: [E], or None.

    Returns:
        [..., E].

    Raises:
        ValueError: shapes disagree.
        TypeError: ``hidden_states`` are not floating; or with ``"model"`` wider than the weight,
            without autocast.
    """
    num_experts = router_config.num_experts
    check_states(hidden_states)
    hidden_dim = hidden_states.shape[-1]
    if gate_weight.shape != (num_experts, hidden_dim):
        raise ValueError(
            f"gate_weight: expected [{num_experts}, {hidden_dim}], got {tuple(gate_weight.shape)}"
        )
    if gate_bias is not None and gate_bias.shape != (num_experts,):
        raise ValueError(f"gate_bias: expected [{num_experts}], got {tuple(gate_bias.shape)}")
    linear = torch.nn.functional.linear
    device_type = hidden_states.device.type
    both = torch.promote_types(hidden_states.dtype, gate_weight.dtype)
    if router_config.logits_dtype == "float32":
        wide = torch.promote_types(both, torch.float32)
        bias = None if gate_bias is None else gate_bias.to(wide)
        with autocast_off(device_type):
            x = to_float32(hidden_states) if wide == torch.float32 else hidden_states.to(wide)
            return linear(x, gate_weight.to(wide), bias)
    if both != gate_weight.dtype and not is_autocast_on(device_type):
        raise TypeError(
            f"hidden_states: expected {gate_weight.dtype} like gate_weight, got "
            f"{hidden_states.dtype}; convert one of them with .to(), or use autocast"
        )
    return linear(hidden_states.to(gate_weight.dtype), gate_weight, gate_bias)


def select_experts(
    logits: Tensor,
    router_config: RouterConfig,
    correction_bias: Tensor | None = None,
    *,
    num_token_non_padded: Tensor | int | None = None,
    topk_ids: Tensor | None = None,
    expert_scale: Tensor | None = None,
    hidden_dtype: torch.dtype | None = None,
) -> StandardTopKOutput:
    """Choose K experts a token, and weigh them.

    Ids are K distinct ones of [0, E), best first. Equal choice values, and equal groups, go to the
    lower id; -0.0 equals 0.0. NaN ranks below -inf, so that a row of NaN gives valid ids too, and
    no id comes from a closed group. Rows do not influence each other. Weights are NaN where the
    family's formula gives NaN for finite weights of that row: a softmax row with a NaN or with
    nothing but -inf, and a row in which a chosen score is NaN. K scores of zero give weights of
    zero, also in families that have no epsilon in their reference.

    No synchronisation with the device and no shape that depends on data. Deterministic. The
    gradient reaches ``logits`` (and ``expert_scale``) through the weights; the choice has none.

    Eager calls on CUDA without gradients are one kernel (:mod:`sgl_moe_jit.ops.route_topk`) up to
    1024 experts, K of 64 and 32 groups; others are torch operations, and so is everything with
    ``SGL_MOE_JIT_ROUTING_KERNEL=0``. Both give the same ids where their scores have the same bits:
    always for sigmoid and choices on the logits. Sums (softmax, renormalisation) may be added in
    another order, as between torch's CPU and CUDA, so that weights differ in the last bits, and of
    softmax scores that tie but for their last bit another may be chosen.

    T tokens, E experts, K = ``router_config.top_k``.

    Args:
        logits: [T, E] floating.
        router_config: The family's.
        correction_bias: [E] float32; given exactly when ``has_correction_bias``.
        num_token_non_padded: Rows from here on are padding: ids -1, weights 0. One integer on the
            logits' device (a captured graph sees it change), or an int.
        topk_ids: [T, K] int32 or int64: ids already chosen (hash routing), which are only weighed;
            without ``correction_bias``.
        expert_scale: [E]; given exactly when ``has_expert_scale``.
        hidden_dtype: Dtype of the hidden states, for ``weights_dtype="hidden"``; None leaves
            those weights in float32.

    Returns:
        ``topk_weights`` [T, K] as ``weights_dtype`` says, ``topk_ids`` [T, K] int32, and in
        ``routed_scaling_factor`` the factor that is still due.

    Raises:
        TypeError, ValueError: names the argument, what was expected and what came.
    """
    weights, ids = select(
        logits,
        router_config,
        correction_bias,
        num_token_non_padded=num_token_non_padded,
        topk_ids=topk_ids,
        expert_scale=expert_scale,
        hidden_dtype=hidden_dtype,
    )
    return StandardTopKOutput(
        weights,
        ids,
        router_config.due_scaling_factor,
        router_config.weight_on_input,
        router_config.num_experts,
    )


def zero_expert_output(
    hidden_states: Tensor, topk_output: StandardTopKOutput, num_experts: int
) -> Tensor:
    """Return what zero ("identity") experts add: each gives its token back, weighted.

    ``out[t] = routed_scaling_factor * hidden_states[t] * sum of weights with id >= num_experts``.
    A runner takes these ids for experts that are not here, so this is all of their output; it is to
    be added like a shared expert's.

    Args:
        hidden_states: [T, H].
        topk_output: The router's choice; ids at or above ``num_experts`` are zero experts.
        num_experts: Experts with weights.

    Returns:
        [T, H], dtype of ``hidden_states``; exactly zero for a token without zero experts. The
        product is taken in float32 and rounded once.
    """
    wide = _wide_of(hidden_states)
    is_zero = topk_output.topk_ids >= num_experts
    weights = topk_output.topk_weights.to(wide).masked_fill(~is_zero, 0.0)
    weight = weights.sum(dim=-1, keepdim=True) * topk_output.routed_scaling_factor
    output = (hidden_states.to(wide) * weight).to(hidden_states.dtype)
    # Not 0 * x, which is NaN where x is.
    return output.masked_fill(~is_zero.any(dim=-1, keepdim=True), 0.0)


def _wide_of(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
