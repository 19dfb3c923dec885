# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``HomeExpander``: every token's shared expert on the token's own rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout, check_layout
from sgl_moe_jit.ops import expand_topk_with_shared_expert


@dataclass(frozen=True)
class HomeExpander:
    """Numbers a router's ids for dispatch, and appends the shared slots of this rank.

    Attributes:
        layout: Of the ranks; ``num_shared`` at least 1.
        rank: This rank.

    Raises:
        TypeError: ``layout`` or ``rank`` is none.
        ValueError: there is no such rank, or the layout has no shared slot.
    """

    layout: EpLayout
    rank: int

    def __post_init__(self) -> None:
        """Refuse a layout or rank that has no shared slot."""
        check_layout(self.layout)
        self.layout.check_rank(self.rank)
        if not self.layout.num_shared:
            raise ValueError(
                "layout: expected num_shared of at least 1, got 0; without shared slots a block "
                "takes no expander"
            )

    def __call__(
        self, topk_ids: Tensor, topk_weights: Tensor, shared_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return ids and weights [T, K + S].

        Args:
            topk_ids: [T, K] int32 or int64 physical routed ids, negative = none.
            topk_weights: [T, K] float32.
            shared_weight: Of the shared columns.

        Raises:
            TypeError, ValueError: see :func:`sgl_moe_jit.ops.expand_topk_with_shared_expert`.
        """
        layout = self.layout
        return expand_topk_with_shared_expert(
            topk_ids,
            topk_weights,
            layout.num_physical,
            layout.ep_size,
            self.rank,
            shared_weight,
            num_shared=layout.num_shared,
        )
