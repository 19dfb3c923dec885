# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""From router logits to K expert ids and weights a token: one CUDA kernel, or plain torch.

The kernel (:mod:`sgl_moe_jit.ops.route_topk`) serves eager CUDA calls without gradients; all others
are plain torch: CPU, ``torch.compile(fullgraph=True)``, gradients, float64. Neither has a
data-dependent shape or synchronises, so that both can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.moe.input_checks import check_dense
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.ops import route_topk
from sgl_moe_jit.ops.finalize_arguments import check_int

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def order_key(x: Tensor) -> Tensor:
    """Return integers that order as ``x`` does, with NaN below -inf and -0.0 equal to 0.0.

    Read as integers, floats of one sign order like their magnitudes: the bits of a negative one are
    turned around. The integer below NaN's is free, for what must never be chosen.
    """
    integer = _BITS[x.dtype]
    limits = torch.iinfo(integer)
    bits = x.masked_fill(x == 0, 0.0).view(integer)
    key = torch.where(bits < 0, bits ^ limits.max, bits)
    return key.masked_fill(x.isnan(), limits.min + 1)


def first_by_key(key: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest keys of each row, int64; equal keys by lower column.

    A stable sort, since ``torch.topk`` does not say which of several equal items it takes.
    """
    return torch.sort(key, dim=-1, descending=True, stable=True).indices[..., :k]


def _open_experts(choice: Tensor, config: RouterConfig) -> Tensor:
    """Return [T, E] bool: the experts in a token's best groups."""
    size = config.num_experts // config.n_group
    grouped = choice.masked_fill(choice.isnan(), float("-inf")).unflatten(-1, (-1, size))
    if config.group_rule == "max":
        group_scores = grouped.amax(dim=-1)
    else:
        group_scores = grouped.topk(min(2, size), dim=-1).values.sum(dim=-1)
    groups = first_by_key(order_key(group_scores), config.topk_group)
    is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
    return is_open.unsqueeze(-1).expand(grouped.shape).flatten(-2)


def choose_ids(choice: Tensor, config: RouterConfig) -> Tensor:
    """Return K distinct ids in [0, E) of each row of choice values [T, E], best first."""
    key = order_key(choice)
    if config.limits_groups:
        key = key.masked_fill(~_open_experts(choice, config), torch.iinfo(key.dtype).min)
    return first_by_key(key, config.top_k)


def apply_scores(logits: Tensor, config: RouterConfig) -> Tensor:
    """Return the scores of logits [..., N], rounded as the family rounds them, held wide."""
    wide = _wide(logits.dtype)
    dtype = wide if config.scores_dtype == "float32" else logits.dtype
    if config.score_function == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=wide).to(dtype)
    elif config.score_function == "sigmoid":
        scores = torch.sigmoid(logits.to(wide)).to(dtype)
    else:
        # In the scores' dtype, step by step: the reference rounds between the two.
        scores = torch.nn.functional.softplus(logits.to(dtype)).sqrt()
    return scores.to(wide)


def _scaled(weights: Tensor, logits_dtype: torch.dtype, config: RouterConfig) -> Tensor:
    """Renormalise and scale [T, K] weights held wide."""
    wide = weights.dtype
    dtype = wide if config.scores_dtype == "float32" else logits_dtype

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    if config.renormalize:
        total = rounded(weights.sum(dim=-1, keepdim=True))
        if config.epsilon_kind == "clamp":
            total = total.clamp(min=config.renormalize_epsilon)
        elif config.renormalize_epsilon:
            total = total + config.renormalize_epsilon
        # K weights of zero stay zero, also in families whose reference has no epsilon: 0/0 there.
        weights = rounded(weights / total.masked_fill(total == 0, 1.0))
    if config.scale_in_weights and config.routed_scaling_factor != 1.0:
        weights = rounded(weights * config.routed_scaling_factor)
    return weights


def select(
    logits: Tensor,
    config: RouterConfig,
    correction_bias: Tensor | None,
    *,
    num_token_non_padded: Tensor | int | None,
    topk_ids: Tensor | None,
    expert_scale: Tensor | None,
    hidden_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, K] and ids [T, K] int32; see :func:`sgl_moe_jit.select_experts`."""
    check_arguments(logits, config, correction_bias, topk_ids, expert_scale)
    weights_dtype = _wide(logits.dtype)
    if config.weights_dtype == "logits":
        weights_dtype = logits.dtype
    elif config.weights_dtype == "hidden" and hidden_dtype is not None:
        weights_dtype = hidden_dtype
    if num_token_non_padded is not None:
        check_count(logits, num_token_non_padded)
    if topk_ids is None and not torch.compiler.is_compiling():
        call = (correction_bias, expert_scale, num_token_non_padded, weights_dtype)
        if not route_topk.refusal(logits, config.kernel_options, *call):
            return route_topk.route_topk(logits, config.kernel_options, *call)
    wide = _wide(logits.dtype)
    scores = None if config.score_after_top_k else apply_scores(logits, config)
    if topk_ids is not None:
        ids = topk_ids.long()
    else:
        choice = logits.to(wide) if scores is None else scores
        if correction_bias is not None:
            choice = choice + correction_bias
        ids = choose_ids(choice.detach().to(wide), config)
    if scores is None:
        weights = apply_scores(logits.gather(-1, ids), config)
    else:
        weights = scores.gather(-1, ids)
    weights = _scaled(weights, logits.dtype, config)
    if expert_scale is not None:
        weights = weights * expert_scale.to(wide)[ids]
    weights = weights.to(weights_dtype)
    ids = ids.to(torch.int32)
    if num_token_non_padded is not None:
        padded = padded_rows(logits, num_token_non_padded)
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    return weights, ids


def padded_rows(
    rows: Tensor, num_token_non_padded: Tensor | int, name: str = "the logits"
) -> Tensor:
    """Return [T, 1] bool: which rows of [T, ...] are padding. Arguments: :func:`check_count`."""
    check_count(rows, num_token_non_padded, name)
    count = num_token_non_padded
    if isinstance(count, Tensor):
        count = count.reshape(())
    numbers = torch.arange(rows.shape[0], device=rows.device)
    return (numbers >= count).unsqueeze(-1)


def check_count(rows: Tensor, num_token_non_padded: Tensor | int, name: str = "the logits") -> None:
    """Check a number of rows that are no padding.

    Args:
        rows: Any tensor of T rows.
        num_token_non_padded: Rows from here on are padding: one integer on the rows' device, or an
            int.
        name: What ``rows`` are, in messages.

    Raises:
        TypeError: neither a tensor nor an int.
        ValueError: not one integer, or on another device.
    """
    count = num_token_non_padded
    if isinstance(count, Tensor):
        if count.numel() != 1 or count.is_floating_point() or count.dtype == torch.bool:
            raise ValueError(
                "num_token_non_padded: expected one integer, got "
                f"{count.dtype} of shape {tuple(count.shape)}"
            )
        # A graph would keep the value that a CPU scalar had when it was captured.
        if count.device != rows.device:
            raise ValueError(
                f"num_token_non_padded: expected device {rows.device} like {name}, got "
                f"{count.device}; move it with .to(), or pass an int"
            )
    else:
        check_int("num_token_non_padded", count, "an int of at most 64 bits")


def check_arguments(
    logits: Tensor,
    config: RouterConfig,
    correction_bias: Tensor | None,
    topk_ids: Tensor | None,
    expert_scale: Tensor | None,
) -> None:
    """Check kinds and shapes against the config.

    Raises:
        TypeError: a dtype; ``correction_bias`` must be float32, for it has lost bits otherwise.
        ValueError: a shape, or a tensor that the config does not know or that it asks for.
    """
    num_experts = config.num_experts
    check_dense("logits", logits)
    if topk_ids is not None:
        check_dense("topk_ids", topk_ids)
    if not logits.is_floating_point():
        raise TypeError(f"logits: expected a floating dtype, got {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] != num_experts:
        raise ValueError(f"logits: expected [num_tokens, {num_experts}], got {tuple(logits.shape)}")
    for name, asked, tensor in (
        ("correction_bias", config.has_correction_bias and topk_ids is None, correction_bias),
        ("expert_scale", config.has_expert_scale, expert_scale),
    ):
        if (tensor is not None) != asked:
            raise ValueError(
                f"{name}: expected {'a tensor' if asked else 'None'} for this RouterConfig, "
                f"got {'None' if tensor is None else 'a tensor'}"
            )
        if tensor is not None and tensor.shape != (num_experts,):
            raise ValueError(f"{name}: expected [{num_experts}], got {tuple(tensor.shape)}")
    if correction_bias is not None and correction_bias.dtype not in _BITS:
        raise TypeError(
            f"correction_bias: expected float32, got {correction_bias.dtype}; casting it back does "
            "not bring its bits back: load it again in float32 and keep it so"
        )
    if topk_ids is not None and (
        topk_ids.dtype not in (torch.int32, torch.int64)
        or topk_ids.shape != (logits.shape[0], config.top_k)
    ):
        raise ValueError(
            f"topk_ids: expected int32 or int64 [{logits.shape[0]}, {config.top_k}], got "
            f"{topk_ids.dtype} {tuple(topk_ids.shape)}"
        )
