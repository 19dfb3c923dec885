# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's expert parameters, with their layout declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_moe_jit.moe.quantization import Quantization


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's expert parameters, as views, with their layout declared.

    E experts on this rank, H hidden size, I expert width. The layout comes from the flags alone and
    is never guessed from a shape: 2I == H and I == H occur in public models.

    Attributes:
        up: First projection. With a gate [E, 2I, H], without [E, I, H]; last two dimensions swapped
            when ``is_transposed``.
        down: Second projection, [E, H, I]; swapped when ``is_transposed``.
        activation: From the first projection's output [N, 2I] (or [N, I] without a gate) to [N, I].
            It alone knows whether gate and up are halves or interleaved, and what is clamped.
        is_transposed: Whether matrices are stored input-major.
        has_gate: Whether the first projection holds gate and up.
        up_bias: [E, 2I] or [E, I], or None.
        down_bias: [E, H], or None.
        post_expert_norm: Applied to each expert row before it is weighted, or None.
        is_silu_and_mul: Whether ``activation`` is exactly ``silu(first half) * second half``, so
            that a runner may use its own kernel for it.
        up_scale: Scales of ``up``'s output rows where it is float8_e4m3fn: float32 [E, 2I] or
            [E, I], or with a last dimension of 1, as checkpoints have them. The weight is
            ``up * scale``. Activations are then quantized by row as they come.
        down_scale: Scales of ``down``'s output rows: float32 [E, H] or [E, H, 1].
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    is_transposed: bool = False
    has_gate: bool = True
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    post_expert_norm: Callable[[Tensor], Tensor] | None = None
    is_silu_and_mul: bool = False
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.up.shape[0]

    def activate(self, projected: Tensor) -> Tensor:
        """Return the activation of the first projection's output: [N, I].

        Raises:
            ValueError: it returned another width, as ``silu`` alone does of gate and up.
        """
        hidden = self.activation(projected)
        width = self.down_as_input_major().shape[1]
        if hidden.shape[-1] != width:
            raise ValueError(
                f"activation: expected {width} columns, down's input, from "
                f"{projected.shape[-1]}, got {hidden.shape[-1]}"
            )
        return hidden

    def up_as_input_major(self) -> Tensor:
        """Return ``up`` as [E, H, 2I] (a view)."""
        return self.up if self.is_transposed else self.up.transpose(1, 2)

    def down_as_input_major(self) -> Tensor:
        """Return ``down`` as [E, I, H] (a view)."""
        return self.down if self.is_transposed else self.down.transpose(1, 2)

    @property
    def quantization(self) -> Quantization:
        """Form of the two projections."""
        if self.up_scale is None:
            return Quantization.NONE
        return Quantization.FP8_PER_CHANNEL

    def up_scale_by_row(self) -> Tensor:
        """Return ``up_scale`` as [E, 2I] (a view).

        Raises:
            ValueError: the weights have no scales.
        """
        return _by_row(self.up_scale)

    def down_scale_by_row(self) -> Tensor:
        """Return ``down_scale`` as [E, H] (a view). See :meth:`up_scale_by_row`."""
        return _by_row(self.down_scale)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
        """Return a copy without scales, each weight ``value * scale`` in float32, rounded once.

        It takes twice the memory, has gradients, and its activations are not quantized: results
        differ from the quantized layer's by that layer's rounding of activations.

        Args:
            dtype: Of the copies.
        """
        if self.quantization is Quantization.NONE:
            return self

        def wide(values: Tensor, scale: Tensor) -> Tensor:
            return (values.float() * scale.unsqueeze(1 if self.is_transposed else 2)).to(dtype)

        return replace(
            self,
            up=wide(self.up, self.up_scale_by_row()),
            down=wide(self.down, self.down_scale_by_row()),
            up_scale=None,
            down_scale=None,
        )


def _by_row(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise ValueError("up_scale, down_scale: expected tensors, got None")
    return scale.squeeze(2) if scale.dim() == 3 else scale
