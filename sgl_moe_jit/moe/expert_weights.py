# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's expert parameters, with their layout declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
