# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How often each routed expert is chosen: what a balancer learns from, without shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout, check_ids, check_layout
from sgl_moe_jit.ops.finalize_arguments import check_int


def drop_shared_counts(
    counts: Tensor, num_local_routed: int, num_trailing_shared_slots: int
) -> Tensor:
    """Return a rank's counts of its routed slots.

    Args:
        counts: [..., L + S], one entry a slot of the rank, shared slots last.
        num_local_routed: L.
        num_trailing_shared_slots: S, as whoever counted declares it.

    Returns:
        [..., L], a view.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the last dimension is not L + S. A tail is never guessed, since counts of shared
            experts in an expert's place would pass for its load.
    """
    if not isinstance(counts, Tensor):
        raise TypeError(f"counts: expected a Tensor, got {type(counts).__name__}")
    check_int("num_local_routed", num_local_routed, "at least 1")
    check_int("num_trailing_shared_slots", num_trailing_shared_slots, "at least 0")
    expected = num_local_routed + num_trailing_shared_slots
    got = counts.shape[-1] if counts.dim() else 0
    if num_local_routed < 1 or num_trailing_shared_slots < 0 or got != expected:
        raise ValueError(
            f"counts: expected {expected} entries, {num_local_routed} routed slots and "
            f"{num_trailing_shared_slots} trailing shared ones, got {tuple(counts.shape)}"
        )
    return counts[..., :num_local_routed]


class ExpertCounts:
    """Choices of each physical routed expert, summed over calls.

    Adding makes no synchronisation and no tensor that outlives the call, so that it can be captured
    in a CUDA graph. Sums are of integers: any order of calls gives the same.

    Args:
        layout: The layout.
        device: Where to count.
    """

    def __init__(self, layout: EpLayout, device: torch.device | str | None = None) -> None:
        check_layout(layout)
        self.layout = layout
        # One more than there are experts: where choices of no expert go. An inference tensor could
        # not be added to outside of inference mode.
        with torch.inference_mode(False):
            self._bins = torch.zeros(layout.num_physical + 1, dtype=torch.int64, device=device)

    @property
    def counts(self) -> Tensor:
        """[E] int64, a view: choices of each physical routed expert so far."""
        return self._bins[:-1]

    def add_routed(self, topk_ids: Tensor) -> None:
        """Count physical routed ids of any shape, as :func:`to_physical` gives them; skip below 0.

        Raises:
            TypeError: they are no int32 or int64.
            ValueError: an id is no routed expert (a shared column among them): always for CPU
                tensors, for CUDA tensors with ``SGL_MOE_JIT_CHECK_INDICES=1``, and else torch's
                device-side assertion.
        """
        check_ids(topk_ids, self.layout.num_physical)
        self._add(topk_ids)

    def add_dispatched(self, dispatch_ids: Tensor) -> None:
        """Count ids of the dispatch space, of any shape; skip shared slots. Errors alike."""
        self._add(self.layout.to_routed(dispatch_ids))

    def add_local(self, rank: int, counts: Tensor, *, num_trailing_shared_slots: int = 0) -> None:
        """Add counts of a rank's slots, as a dispatcher reports them.

        Args:
            rank: The rank.
            counts: [L + S], integers.
            num_trailing_shared_slots: S; see :func:`drop_shared_counts`.

        Raises:
            TypeError: counts are no integers.
            ValueError: there is no such rank, or another number of counts than declared.
        """
        local = self.layout.num_local_routed
        if not isinstance(counts, Tensor):
            raise TypeError(f"counts: expected a Tensor, got {type(counts).__name__}")
        if counts.dim() != 1:
            raise ValueError(f"counts: expected [slots], got {tuple(counts.shape)}")
        dtype = counts.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise TypeError(f"counts: expected integers, got {dtype}")
        self.layout.check_rank(rank)
        routed = drop_shared_counts(counts, local, num_trailing_shared_slots)
        self._bins[rank * local : (rank + 1) * local] += routed

    def reset(self) -> None:
        """Start again from 0, in place."""
        self._bins.zero_()

    def _add(self, routed: Tensor) -> None:
        bins = torch.where(routed < 0, self.layout.num_physical, routed).flatten().long()
        self._bins.scatter_add_(0, bins, torch.ones_like(bins))
