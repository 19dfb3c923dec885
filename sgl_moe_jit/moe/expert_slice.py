# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One rank's slice of a layer: which experts it holds, and who else holds the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.topk import StandardTopKOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ExpertRange:
    """The experts of one rank: ``first`` up to ``first + count`` of the layer's ids."""

    first: int
    count: int

    def __post_init__(self) -> None:
        """Refuse what is no range. Raises ValueError."""
        if self.first < 0 or self.count < 1:
            raise ValueError(
                f"expert_range: expected first >= 0 and count >= 1, got {self.first}, {self.count}"
            )

    def localize(self, topk_output: StandardTopKOutput) -> StandardTopKOutput:
        """Return the choice with this rank's numbering, in one elementwise operation.

        An expert before the range comes out below 0 and one behind it at ``count`` or above. Both
        mean "no expert here" to a runner, as does any id that meant so before: its row index is
        -1, its pair costs nothing, and the sum is this rank's part.
        """
        if self.first == 0:
            return topk_output
        return replace(topk_output, topk_ids=topk_output.topk_ids - self.first)


class ReduceGroups:
    """The process groups over which a layer's output is a sum of parts.

    Deep copies share the groups; they cannot be pickled.

    Args:
        tp_group: Ranks that hold slices of each expert, or None.
        ep_group: Ranks that hold different experts, or None.
    """

    def __init__(self, tp_group: ProcessGroup | None, ep_group: ProcessGroup | None) -> None:
        given = [("ep", ep_group), ("tp", tp_group)]
        self._groups = [(name, group) for name, group in given if group is not None]
        self.size = math.prod(group.size() for _, group in self._groups)

    @property
    def given(self) -> bool:
        """Whether there is a group at all, of one rank or more."""
        return bool(self._groups)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one of its groups that adds what all of them hold."""
        return all(group.rank() == 0 for _, group in self._groups)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the groups, in place, and return it.

        Raises:
            RuntimeError: ``x`` has a gradient: whether it is to be summed as well depends on how
                the loss is spread over the ranks, which is not known here.
        """
        if self.size == 1:
            return x
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "reduce_results: torch.distributed.all_reduce has no gradient here; pass "
                "reduce_results=False and reduce with torch.distributed.nn.functional.all_reduce, "
                "or call under torch.no_grad()"
            )
        for _, group in self._groups:
            torch.distributed.all_reduce(x, group=group)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> ReduceGroups:
        return self

    def __reduce__(self) -> Any:
        if not self._groups:
            return ReduceGroups, (None, None)
        raise TypeError(
            "process groups cannot be pickled; save state_dict(), and pass groups when building "
            "the layer again"
        )

    def __str__(self) -> str:
        sizes = " x ".join(f"{name} {group.size()}" for name, group in self._groups)
        return sizes or "one rank"
