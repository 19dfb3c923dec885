# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a runner is called with: checked, and weighed where weights belong on the input."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sgl_moe_jit.moe.autocast import is_autocast_on
from sgl_moe_jit.moe.input_checks import check_dense
from sgl_moe_jit.moe.topk import StandardTopKOutput


def check_input_dtype(hidden_states: Tensor, expected: torch.dtype) -> None:
    """Refuse hidden states of another dtype than the expert weights'. Not under autocast.

    Raises:
        TypeError: names both.
    """
    if hidden_states.dtype != expected and not is_autocast_on(hidden_states.device.type):
        name, got = (str(x).removeprefix("torch.") for x in (expected, hidden_states.dtype))
        raise TypeError(
            f"hidden_states: expected {name} like the expert weights, got {got}; convert one of "
            "them with .to(), or use autocast"
        )


def weigh_input(
    hidden_states: Tensor, topk_output: StandardTopKOutput
) -> tuple[Tensor, StandardTopKOutput]:
    """Apply weights that belong on the experts' input, and leave ones behind.

    Returns:
        Hidden states and choice; both as they came where weights belong on the output.
    """
    if not topk_output.weight_on_input:
        return hidden_states, topk_output
    weights = topk_output.topk_weights
    scaled = (hidden_states * weights).to(hidden_states.dtype)
    return scaled, replace(
        topk_output, topk_weights=torch.ones_like(weights), weight_on_input=False
    )


def check_topk(hidden_states: Tensor, topk_output: StandardTopKOutput, hidden_dim: int) -> None:
    """Check the shapes a runner relies on.

    Raises:
        TypeError: one is not a dense tensor, ``topk_ids`` is not int32 or int64, or
            ``topk_weights`` is not floating.
        ValueError: shapes disagree; names argument, expected and got.
    """
    check_dense("hidden_states", hidden_states)
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden_dim:
        raise ValueError(
            f"hidden_states: expected [num_tokens, {hidden_dim}], got {tuple(hidden_states.shape)}"
        )
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    check_dense("topk_ids", ids)
    check_dense("topk_weights", weights)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids: expected int32 or int64, got {ids.dtype}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights: expected a floating dtype, got {weights.dtype}")
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"topk_ids: expected [{hidden_states.shape[0]}, top_k], got {tuple(ids.shape)}"
        )
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights: expected {tuple(ids.shape)}, got {tuple(weights.shape)}")
