# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which rows go to which rank and where those that come back belong: index arithmetic alone.

No collective and, given the counts, no synchronisation. T tokens, J slots a token, W ranks, B slots
a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What has to be the same on every rank, since bytes and splits are made of it.
FACTS = (
    "hidden_states.shape[1]",
    "hidden_states.dtype",
    "topk_ids.shape[1]",
    "num_local_experts",
    "sum_at",
)


@dataclass(frozen=True)
class Notice:
    """What a rank tells another one before it sends rows.

    Attributes:
        rows: Rows that follow.
        pairs: (row, slot) pairs among them.
        bad: Ids out of range on the sender; below 0: it stopped before its dispatch. With ``facts``
            it lets all ranks refuse together what one of them got wrong, where they would wait for
            it otherwise.
        facts: A number for each of ``FACTS``.
    """

    rows: int
    pairs: int
    bad: int
    facts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Targets:
    """Where each slot goes.

    Attributes:
        owner: [T, J] int64: the rank of each slot, W where there is none.
        hit: [T, W] bool: whether a token goes to a rank.
        bad: [] int64: ids at W * B or above, which go nowhere.
    """

    owner: Tensor
    hit: Tensor
    bad: Tensor

    @classmethod
    def of(cls, topk_ids: Tensor, ranks: int, num_local: int) -> Targets:
        """Look at ids of the dispatch space."""
        bad = topk_ids >= ranks * num_local
        owner = torch.div(topk_ids, num_local, rounding_mode="floor").long()
        owner = owner.masked_fill((topk_ids < 0) | bad, ranks)
        hit = owner.new_zeros((owner.shape[0], ranks + 1), dtype=torch.bool)
        return cls(owner, hit.scatter_(1, owner, True)[:, :ranks], bad.sum())

    def notices(self, facts: Tensor) -> Tensor:
        """Return a :class:`Notice` for each rank, int64; ``facts`` are [len(FACTS)]."""
        ranks = self.hit.shape[1]
        owner = self.owner.reshape(-1)
        pairs = owner.new_zeros(ranks + 1).scatter_add_(0, owner, torch.ones_like(owner))
        counts = torch.stack((self.hit.sum(0), pairs[:ranks], self.bad.expand(ranks)), dim=1)
        return torch.cat((counts, facts.expand(ranks, -1)), dim=1)

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Return rank and token of each row to send, by rank, then token: [count] int64 each."""
        flat = true_places(self.hit.t().reshape(-1), count)
        num_tokens = max(self.hit.shape[0], 1)
        return torch.div(flat, num_tokens, rounding_mode="floor"), flat % num_tokens

    def index_of_pairs(self) -> Tensor:
        """Return [T, J] int32: each slot's place among all, by rank, token, slot; -1: none."""
        owner = self.owner.reshape(-1)
        order = torch.argsort(owner, stable=True)
        numbers = torch.arange(owner.numel(), dtype=torch.int32, device=owner.device)
        place = torch.empty_like(numbers).scatter_(0, order, numbers)
        return place.masked_fill(owner >= self.hit.shape[1], -1).view(self.owner.shape)

    def index_of_sums(self, row_of: Tensor) -> Tensor:
        """Return [T, J] int32: at each rank's first slot its row ``row_of`` [T, W], else -1."""
        ranks, top_k = self.hit.shape[1], self.owner.shape[1]
        slots = torch.arange(top_k, device=self.owner.device).expand(self.owner.shape)
        first = slots.new_full((slots.shape[0], ranks + 1), top_k)
        first.scatter_reduce_(1, self.owner, slots, "amin")
        is_first = (first.gather(1, self.owner) == slots) & (self.owner < ranks)
        row = row_of.gather(1, self.owner.clamp(max=ranks - 1))
        return torch.where(is_first, row, -1).to(torch.int32)


def stopped_notices(ranks: int, device: torch.device) -> Tensor:
    """Return for each rank the :class:`Notice` that this one stopped, int64."""
    told = torch.zeros((ranks, 3 + len(FACTS)), dtype=torch.int64, device=device)
    told[:, 2] = -1
    return told


def true_places(mask: Tensor, count: int) -> Tensor:
    """Return where a flat mask is True, [count] int64, given how often: without a synchronisation.

    ``torch.nonzero`` waits for the device to learn the count.
    """
    target = torch.where(mask, mask.cumsum(0) - 1, count)
    places = target.new_empty(count + 1)  # the last one collects the rest
    numbers = torch.arange(mask.numel(), device=mask.device)
    return places.scatter_(0, target, numbers)[:count]


def check_notices(received: list[Notice]) -> None:
    """Refuse, on every rank alike, what some rank got wrong.

    Raises:
        ValueError: names the ranks.
    """
    stopped = [str(rank) for rank, notice in enumerate(received) if notice.bad < 0]
    if stopped:
        raise ValueError(
            f"dispatch: expected every rank to come, and rank {', '.join(stopped)} stopped before "
            "it; its own error says why"
        )
    for name, *values in zip(FACTS, *(notice.facts for notice in received), strict=True):
        if len({*values}) > 1:
            raise ValueError(f"{name}: expected the same on every rank, got {values} by rank")
    bad = {rank: notice.bad for rank, notice in enumerate(received) if notice.bad}
    if bad:
        raise ValueError(
            "topk_ids: expected ids of the dispatch space, below ep_size * num_local_experts, on "
            "every rank; out of range: "
            + ", ".join(f"{count} on rank {rank}" for rank, count in bad.items())
        )


def read_notices(sent: Tensor, received: Tensor) -> tuple[list[Notice], list[Notice]]:
    """Bring both to the host, in one copy, and check them.

    Raises:
        ValueError: see :func:`check_notices`.
    """
    ours, theirs = (
        [Notice(rows, pairs, bad, tuple(facts)) for rows, pairs, bad, *facts in table]
        for table in torch.stack((sent, received)).tolist()
    )
    check_notices(theirs)
    return ours, theirs
