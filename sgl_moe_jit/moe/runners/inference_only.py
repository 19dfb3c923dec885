# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What quantized experts take: hidden states in bfloat16, without a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.expert_weights import ExpertWeights


def _tensors(weights: ExpertWeights) -> Iterator[tuple[str, Tensor | None]]:
    for name in ("up", "down", "up_scale", "down_scale", "up_bias", "down_bias"):
        yield name, getattr(weights, name)
    for name in ("activation", "post_expert_norm"):
        module = getattr(weights, name)
        if isinstance(module, torch.nn.Module):
            for inner, parameter in module.named_parameters():
                yield f"{name}.{inner}", parameter


def check_quantized_input(runner: str, weights: ExpertWeights, hidden_states: Tensor) -> None:
    """Refuse another dtype, and a gradient that would have to pass a rounding, which has none.

    Weights of the router's choice may have one: it does not pass the experts.

    Raises:
        TypeError: ``hidden_states`` are not bfloat16.
        UnsupportedError: a gradient; names runner, tensor and the ways out.
    """
    if hidden_states.dtype != torch.bfloat16:
        raise TypeError(
            f"hidden_states: expected bfloat16 for experts in {weights.quantization}, got "
            f"{hidden_states.dtype}; convert them with .to()"
        )
    if not torch.is_grad_enabled():
        return
    for name, x in (("hidden_states", hidden_states), *_tensors(weights)):
        if x is not None and x.requires_grad:
            raise UnsupportedError(
                f"runner {runner!r}: {name} requires a gradient, and experts in "
                f"{weights.quantization} have none; run them under torch.no_grad() or "
                "torch.inference_mode(), or train (adapters included) on "
                "ExpertWeights.dequantized(), a copy in bfloat16"
            )
