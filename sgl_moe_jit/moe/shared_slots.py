# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Shared experts as expert slots: one MLP cut into slots whose outputs sum up to its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig


@dataclass(frozen=True)
class SharedMlp:
    """The matrices of a shared MLP, ``down(silu(gate(x)) * up(x))``, without biases.

    Attributes:
        gate: [S I, H].
        up: [S I, H].
        down: [H, S I].
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    def slots_of(self, weights: ExpertWeights) -> int:
        """Return S, the number of slots of these routed experts' width that it fills.

        Raises:
            TypeError: dtypes or devices differ from the experts'; names both.
            ValueError: sizes do not fit, names both; or the routed experts are quantized, or
                compute something else between or behind their matrices.
        """
        if not weights.is_silu_and_mul or weights.post_expert_norm is not None:
            raise ValueError(
                "shared experts: expected routed experts that are SwiGLU MLPs as they are, got "
                f"activation {weights.activation}, norm {weights.post_expert_norm}"
            )
        if weights.quantization is not Quantization.NONE:
            raise ValueError(
                f"shared experts: expected routed experts that are not quantized, got "
                f"{weights.quantization}; keep the shared experts beside them"
            )
        config = RunnerConfig.of(weights)
        for name, matrix in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            got = (matrix.dtype, matrix.device)
            if got != (config.dtype, config.device):
                raise TypeError(
                    f"shared {name}: expected {config.dtype} on {config.device} like the routed "
                    f"experts, got {got[0]} on {got[1]}; one layer holds one format"
                )
        width, hidden = self.gate.shape
        if self.up.shape != (width, hidden) or self.down.shape != (hidden, width):
            raise ValueError(
                "shared gate, up, down: expected [S I, H], [S I, H] and [H, S I], got "
                f"{tuple(self.gate.shape)}, {tuple(self.up.shape)}, {tuple(self.down.shape)}"
            )
        if hidden != config.hidden_dim:
            raise ValueError(
                f"shared experts: expected the routed experts' hidden size {config.hidden_dim}, "
                f"got {hidden}"
            )
        if width == 0 or width % config.intermediate_dim:
            raise ValueError(
                "shared experts: expected a width that is a multiple of the routed experts' "
                f"{config.intermediate_dim}, got {width}"
            )
        return width // config.intermediate_dim


def take_slots(
    weights: ExpertWeights, experts: Sequence[int], shared: SharedMlp | None = None
) -> ExpertWeights:
    """Return a rank's slots: chosen routed experts, then the shared MLP in slots of their width.

    Slot ``s`` of the shared MLP has columns ``s I`` to ``(s + 1) I`` of its intermediate values:
    those rows of gate and up, those columns of down. Each row of down is a sum over all of them,
    so the slots' outputs sum up to the MLP's, up to the order of that sum.

    Args:
        weights: All routed experts of the layer, E of them.
        experts: Which of them the slots hold, in order; one may stand there twice.
        shared: The shared MLP, or None.

    Returns:
        Copies of the tensors in the layout of ``weights``, ``len(experts) + S`` slots. Their
        gradients do not reach the originals.

    Raises:
        ValueError: an expert is none; or see :meth:`SharedMlp.slots_of`.
        TypeError: see :meth:`SharedMlp.slots_of`.
    """
    if not experts or not 0 <= min(experts) <= max(experts) < weights.num_experts:
        raise ValueError(
            f"experts: expected some of 0 to {weights.num_experts - 1}, got {list(experts)}"
        )
    num_shared = 0 if shared is None else shared.slots_of(weights)

    def taken(stored: Tensor) -> Tensor:
        slots = stored.new_zeros(len(experts) + num_shared, *stored.shape[1:])
        for slot, expert in enumerate(experts):
            slots[slot] = stored[expert]
        return slots

    with torch.no_grad():
        slots = replace(
            weights,
            up=taken(weights.up),
            down=taken(weights.down),
            # Zero in the shared slots.
            up_bias=None if weights.up_bias is None else taken(weights.up_bias),
            down_bias=None if weights.down_bias is None else taken(weights.down_bias),
            up_scale=None if weights.up_scale is None else taken(weights.up_scale),
            down_scale=None if weights.down_scale is None else taken(weights.down_scale),
        )
        if shared is not None:
            _fill(slots, len(experts), num_shared, shared)
    return slots


def _fill(slots: ExpertWeights, first: int, num_shared: int, shared: SharedMlp) -> None:
    """Write the shared MLP into the slots from ``first`` on."""
    up, down = slots.up_as_input_major(), slots.down_as_input_major()
    width = down.shape[1]
    for s in range(num_shared):
        rows = slice(s * width, (s + 1) * width)
        up[first + s, :, :width] = shared.gate[rows].T
        up[first + s, :, width:] = shared.up[rows].T
        down[first + s] = shared.down[:, rows].T
