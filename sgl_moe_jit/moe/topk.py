# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How a router's choice travels to a runner."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import check_factor


class TopKFormat(enum.Enum):
    """Form of a router's output."""

    STANDARD = "standard"
    """Weights and expert ids, [T, K] each."""
    BYPASSED = "bypassed"
    """Router logits and settings: the runner's kernel routes."""
    PACKED = "packed"
    """Id and weight in one int32 a slot."""


@dataclass(frozen=True)
class StandardTopKOutput:
    """Expert ids and weights of each token.

    Attributes:
        topk_weights: [T, K] floating. Weights of slots without an expert are ignored.
        topk_ids: [T, K] int32 or int64. Negative, or at or above the number of local experts: no
            expert here (masked, padded, or on another rank).
        routed_scaling_factor: Factor still due on the routed sum; 1.0 when the weights already hold
            it. Whoever finishes the sum applies it, once.
    """

    topk_weights: Tensor
    topk_ids: Tensor
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a factor that is a tensor, whose gradient a runner could lose."""
        check_factor(self.routed_scaling_factor)

    @property
    def format(self) -> TopKFormat:
        """``TopKFormat.STANDARD``."""
        return TopKFormat.STANDARD
