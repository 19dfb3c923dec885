# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a runner needs to know about an MoE layer: its sizes, and its expert weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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

    @property
    def num_experts(self) -> int:
        """E."""
        return self.up.shape[0]

    def up_as_input_major(self) -> Tensor:
        """Return ``up`` as [E, H, 2I] (a view)."""
        return self.up if self.is_transposed else self.up.transpose(1, 2)

    def down_as_input_major(self) -> Tensor:
        """Return ``down`` as [E, I, H] (a view)."""
        return self.down if self.is_transposed else self.down.transpose(1, 2)


@dataclass(frozen=True)
class MoEConfig:
    """What decides which runner can serve a layer.

    Attributes:
        num_experts: E, on this rank.
        hidden_dim: H.
        intermediate_dim: I.
        dtype: Of the expert weights.
        device: Of the expert weights.
        is_transposed: Layout of both projections.
        aligned_16_bytes: Whether both projections, and every matrix row in them, start on a
            multiple of 16 bytes.
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    dtype: torch.dtype
    device: torch.device
    is_transposed: bool
    aligned_16_bytes: bool

    @classmethod
    def of(cls, weights: ExpertWeights) -> MoEConfig:
        """Read the sizes off the weights and their declared layout.

        Raises:
            ValueError: the two projections do not belong together; names both shapes.
        """
        up, down = weights.up_as_input_major(), weights.down_as_input_major()
        shapes = f"{tuple(weights.up.shape)} and {tuple(weights.down.shape)}"
        if up.dim() != 3 or down.dim() != 3:
            raise ValueError(f"up, down: expected 3 dimensions, got {shapes}")
        factor = 2 if weights.has_gate else 1
        fits = (
            up.shape[0] == down.shape[0]
            and up.shape[1] == down.shape[2]
            and up.shape[2] == factor * down.shape[1]
        )
        if not fits:
            raise ValueError(
                f"up, down: shapes {shapes} do not belong together with "
                f"is_transposed={weights.is_transposed}, has_gate={weights.has_gate}"
            )

        def aligned(matrix: Tensor) -> bool:
            size = matrix.element_size()
            rows = all(s == 1 or s * size % 16 == 0 for s in matrix.stride())
            # Storages start aligned. Dynamo cannot trace an offset: torch checks it then.
            if torch.compiler.is_compiling():
                return rows
            return rows and matrix.storage_offset() * size % 16 == 0

        return cls(
            num_experts=up.shape[0],
            hidden_dim=up.shape[1],
            intermediate_dim=down.shape[1],
            dtype=up.dtype,
            device=up.device,
            is_transposed=weights.is_transposed,
            aligned_16_bytes=aligned(weights.up) and aligned(weights.down),
        )
