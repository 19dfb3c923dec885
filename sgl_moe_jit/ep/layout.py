# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``EpLayout``: the id spaces of expert parallelism with shared experts as slots of each rank.

Three numberings meet here, and a mix-up of two reads right until a second rank is there:

- checkpoint: routed experts 0 to ``num_experts - 1``, then the shared ones. Loaders count so.
- routed (physical): slots that hold routed experts, over all ranks, replicas included. Routers,
  the table of replicas and statistics count so. Shared experts have no number in it.
- dispatch: every slot of every rank, rank after rank, shared slots at the end of each rank's
  block. What a dispatcher sends counts so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.ops.ep_topk import MAX_RANKS
from sgl_moe_jit.ops.finalize_arguments import check_int

Ids = TypeVar("Ids", int, Tensor)
MAX_EP_SIZE = MAX_RANKS
"""What the ops take."""
_MOST_SLOTS = 2**31 - 1
_LEAST = {"num_experts": 1, "num_redundant": 0, "ep_size": 1, "num_shared": 0}


@dataclass(frozen=True)
class EpLayout:
    """Where routed and shared experts stand on the ranks, and how their ids are numbered.

    E physical routed experts over W ranks, L = E / W a rank, S shared slots a rank, B = L + S slots
    a rank. Ids are Python integers or int32 or int64 tensors of any shape, and what comes back has
    the type, shape and device of what was given. An id below 0 means "no expert" in every space and
    comes back as it is, -1 as -1. Nothing here synchronises a CUDA device, unless
    ``SGL_MOE_JIT_CHECK_INDICES=1`` asks for it.

    Attributes:
        num_experts: Routed experts of the model (logical).
        num_redundant: Replicas of routed experts on top.
        ep_size: W, 1 to 512; E has to be a multiple of it.
        num_shared: S. 0: no shared slots, and both id spaces are one.

    Raises:
        TypeError: an attribute is no integer; ids are no integers, or a tensor of another dtype.
        ValueError: an attribute is out of range, or E is no multiple of ``ep_size``; or an id is
            too large: always for integers and CPU tensors, for CUDA tensors with
            ``SGL_MOE_JIT_CHECK_INDICES=1``. Without it, and in traced code, the formula is applied
            to what is there.

    Source: the rank-major blocks with shared slots at their ends are the convention of sglang's
    DeepEP path, where S was 1.
    """

    num_experts: int
    num_redundant: int = 0
    ep_size: int = 1
    num_shared: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no layout."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.ep_size > MAX_EP_SIZE:
            raise ValueError(f"ep_size: expected at most {MAX_EP_SIZE}, got {self.ep_size}")
        if self.num_physical + self.ep_size * self.num_shared > _MOST_SLOTS:
            raise ValueError(
                "num_experts: expected fewer than 2^31 slots, since ids are int32, got "
                f"{self.num_experts} + {self.num_redundant} + {self.ep_size} * {self.num_shared}"
            )
        over = self.num_physical % self.ep_size
        if over:
            raise ValueError(
                f"ep_size: expected a divisor of the {self.num_physical} routed experts "
                f"({self.num_experts} + {self.num_redundant} redundant), got {self.ep_size}; "
                f"{self.ep_size - over} more redundant experts make it one"
            )

    @property
    def num_physical(self) -> int:
        """E: routed experts with replicas, over all ranks."""
        return self.num_experts + self.num_redundant

    @property
    def num_local_routed(self) -> int:
        """L: routed slots of one rank."""
        return self.num_physical // self.ep_size

    @property
    def num_local(self) -> int:
        """B: slots of one rank, the shared ones last."""
        return self.num_local_routed + self.num_shared

    @property
    def num_total(self) -> int:
        """E + W S: slots of all ranks, one more than the largest id of the dispatch space."""
        return self.num_local * self.ep_size

    def to_dispatch(self, ids: Ids) -> Ids:
        """Return physical routed ids as ids of the dispatch space: ``e + (e // L) * S``."""
        return self._each(
            ids, self.num_physical, lambda e: e + e // self.num_local_routed * self.num_shared
        )

    def to_routed(self, ids: Ids) -> Ids:
        """Return ids of the dispatch space as physical routed ids: -1 for a shared slot.

        A shared slot is no routed expert, and the formula alone would give another rank's.
        """
        routed = self._each(
            ids, self.num_total, lambda d: d - d // self.num_local * self.num_shared
        )
        return _where(self.is_shared(ids), -1, routed)

    def shared_id(self, rank: int, s: int = 0) -> int:
        """Return the dispatch id of a rank's shared slot: ``rank * B + L + s``.

        Raises:
            ValueError: there is no such rank or slot.
        """
        self.check_rank(rank)
        check_int("s", s, f"0 <= s < num_shared, {self.num_shared}")
        if not 0 <= s < self.num_shared:
            raise ValueError(f"s: expected 0 <= s < num_shared, {self.num_shared}, got {s}")
        return rank * self.num_local + self.num_local_routed + s

    def owner_rank(self, ids: Ids) -> Ids:
        """Return the rank that holds each slot of the dispatch space."""
        return self._each(ids, self.num_total, lambda d: d // self.num_local)

    def local_id(self, ids: Ids, rank: int | None = None) -> Ids:
        """Return the number of each slot of the dispatch space on its rank: routed, then shared.

        Args:
            ids: Of the dispatch space.
            rank: Number the slots of this rank, and give -1 for those of others. None: give each
                slot its number on its own rank.

        Raises:
            ValueError: there is no such rank.
        """
        local = self._each(ids, self.num_total, lambda d: d % self.num_local)
        if rank is None:
            return local
        self.check_rank(rank)
        return _where(self.owner_rank(ids) == rank, local, -1)

    def is_shared(self, ids: Ids) -> bool | Tensor:
        """Return whether each id of the dispatch space is a shared slot; False below 0."""
        local = self._each(ids, self.num_total, lambda d: d % self.num_local)
        return local >= self.num_local_routed

    def slot_sources(
        self, rank: int, physical_to_logical: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the checkpoint id whose weights each of a rank's B slots holds.

        Args:
            rank: The rank.
            physical_to_logical: The routed expert in each of the E physical slots; None: in order,
                and from 0 again in the redundant ones.

        Raises:
            TypeError: the table is no sequence of ints.
            ValueError: there is no such rank; or the table is not E long, names an expert that is
                none, or leaves one out.
        """
        self.check_rank(rank)
        if physical_to_logical is None:
            table = [slot % self.num_experts for slot in range(self.num_physical)]
        else:
            table = _table_of(physical_to_logical)
            if len(table) != self.num_physical or {*table} != {*range(self.num_experts)}:
                raise ValueError(
                    f"physical_to_logical: expected {self.num_physical} entries that name each of "
                    f"the experts 0 to {self.num_experts - 1}, got {len(table)} entries that name "
                    f"{len({*table})} experts from {min(table, default=0)} to "
                    f"{max(table, default=0)}"
                )
        first = rank * self.num_local_routed
        routed = table[first : first + self.num_local_routed]
        return (*routed, *range(self.num_experts, self.num_experts + self.num_shared))

    def loader_map(
        self, rank: int, physical_to_logical: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return a rank's slot for each checkpoint id, -1 for those that are not on it.

        The shared experts stand behind the routed ones of the checkpoint, which are the logical
        ones: with redundant experts, id ``num_experts`` is still the first shared expert.

        Args:
            rank: The rank.
            physical_to_logical: As of :meth:`slot_sources`.

        Returns:
            ``num_experts + num_shared`` numbers.

        Raises:
            ValueError: as of :meth:`slot_sources`; or the rank holds one expert twice, which this
                map cannot say.
        """
        slots = [-1] * (self.num_experts + self.num_shared)
        for slot, source in enumerate(self.slot_sources(rank, physical_to_logical)):
            if slots[source] >= 0:
                raise ValueError(
                    f"physical_to_logical: expert {source} is in slots {slots[source]} and {slot} "
                    f"of rank {rank}, and this map holds one; use slot_sources"
                )
            slots[source] = slot
        return tuple(slots)

    def check_rank(self, rank: int, name: str = "rank") -> None:
        """Refuse what is no rank.

        Raises:
            TypeError: it is no int.
            ValueError: it is out of range.
        """
        check_int(name, rank, f"0 <= {name} < ep_size, {self.ep_size}")
        if not 0 <= rank < self.ep_size:
            raise ValueError(f"{name}: expected 0 <= {name} < ep_size, {self.ep_size}, got {rank}")

    def _each(self, ids: Ids, bound: int, formula: Callable[[Ids], Ids]) -> Ids:
        """Apply a formula to ids from 0 to ``bound - 1``, and keep those below 0."""
        if isinstance(ids, Tensor):
            check_ids(ids, bound)
            # Ids below 0 would be divided too; what comes of that is not kept.
            return _where(ids < 0, ids, formula(ids))
        if isinstance(ids, bool) or not hasattr(ids, "__index__"):
            raise TypeError(f"ids: expected an integer or a tensor, got {type(ids).__name__}")
        value = operator.index(ids)
        _check_bound(value, bound)
        return value if value < 0 else formula(value)


def check_layout(layout: object) -> None:
    """Refuse what is no layout.

    Raises:
        TypeError: says what it is.
    """
    if not isinstance(layout, EpLayout):
        raise TypeError(f"layout: expected an EpLayout, got {type(layout).__name__}")


def check_ids(ids: Tensor, bound: int) -> None:
    """Refuse ids of another dtype, and too large ones where they may be looked at.

    Raises:
        TypeError: they are no tensor, or neither int32 nor int64.
        ValueError: one is ``bound`` or above.
    """
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: expected a Tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids: expected int32 or int64, got {ids.dtype}; convert with .to")
    if ids.numel() and may_read(ids):
        _check_bound(int(ids.max()), bound)


def _table_of(physical_to_logical: Sequence[int]) -> list[int]:
    try:
        return [operator.index(expert) for expert in physical_to_logical]
    except TypeError as error:
        raise TypeError(
            f"physical_to_logical: expected a sequence of ints, got "
            f"{type(physical_to_logical).__name__} ({error})"
        ) from error


def may_read(ids: Tensor) -> bool:
    """Whether the largest id may be looked at: free on a CPU, a synchronisation on a GPU."""
    if torch.compiler.is_compiling() or type(ids) not in (Tensor, torch.nn.Parameter):
        return False
    return ids.device.type == "cpu" or env.CHECK_INDICES.get()


def _check_bound(largest: int, bound: int) -> None:
    if largest >= bound:
        raise ValueError(f"ids: expected at most {bound - 1} here, got {largest}")


def _where(condition: bool | Tensor, yes: Ids | int, no: Ids | int) -> Ids:
    if isinstance(condition, Tensor):
        return torch.where(condition, yes, no)  # type: ignore[return-value]
    return yes if condition else no  # type: ignore[return-value]
