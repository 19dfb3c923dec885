# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a block under expert parallelism asks of a dispatcher, and what travels between them.

The implementations stand in ``sgl_moe_jit.ep``; nothing here knows a process group.

T tokens of this rank, J slots a token (the router's K, and S shared columns where shared experts
are fused), W ranks, B slots for experts on each rank, R rows received, H hidden size. Ids of the
dispatch space count all ranks' slots, rank after rank: id ``d`` is slot ``d % B`` of rank
``d // B``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.topk import StandardTopKOutput


@dataclass(frozen=True, eq=False)
class DispatchedRows:
    """The rows that a rank received for its experts.

    Attributes:
        hidden_states: [R, H].
        topk_output: For each row this rank's slots, [R, any number] with ids in [0, B), negative =
            none; and the weights the experts' outputs are summed with here.
        handle: What the dispatcher needs to send results back. Valid for one ``combine``.
    """

    hidden_states: Tensor
    topk_output: StandardTopKOutput
    handle: Any


class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts, and the experts' rows back.

    ``dispatch`` and ``combine`` are collectives: every rank of the group calls both, once a layer
    and in the same order, also one without tokens.

    Attributes:
        num_local_experts: B, the same on every rank.
        takes_deferred: Whether ``combine`` wants the experts' rows un-finalized, one for each pair
            of row and slot. False: it wants their weighted sum, [R, H].
    """

    @property
    def num_local_experts(self) -> int:
        """B."""
        ...

    @property
    def takes_deferred(self) -> bool:
        """Whether ``combine`` takes un-finalized rows."""
        ...

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> DispatchedRows:
        """Send each token to every rank that holds one of its experts.

        Args:
            hidden_states: [T, H]; not changed, and free to be reused on return.
            topk_ids: [T, J] int32 or int64, of the dispatch space. Negative: nothing is sent.
            topk_weights: [T, J] float32.
        """
        ...

    def stop(self, device: torch.device) -> None:
        """Tell the other ranks, where there is a way, that this one will not dispatch.

        Called in place of ``dispatch`` by a rank that an error has stopped before it.

        Args:
            device: Of the tokens.
        """
        ...

    def combine(
        self, expert_output: Tensor | DeferredFinalizeOutput, dispatched: DispatchedRows
    ) -> DeferredFinalizeOutput:
        """Send the experts' output back to where the tokens came from.

        Args:
            expert_output: What the experts made of ``dispatched``, as ``takes_deferred`` says.
            dispatched: What :meth:`dispatch` returned.

        Returns:
            The rows that came back, un-finalized: [T, J] indices and ``top_k`` J, without a factor
            that is due and without a shared output. Finishing it is the combine's sum.
        """
        ...


class SharedExpander(Protocol):
    """Turns a router's choice into ids of the dispatch space, with the shared experts' columns.

    One that asks the other ranks joins them once a call, also with arguments that it refuses, and
    has a second method, ``stop(device, top_k) -> bool``, which joins them in place of a call: a
    rank that an error has stopped before its expander calls it, with K where that is known. It
    returns whether the others go on to their dispatch; if not, nobody tells them, and they wait.
    What wraps such an expander has to pass ``stop`` on.
    """

    def __call__(
        self, topk_ids: Tensor, topk_weights: Tensor, shared_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Return ids and weights [T, K + S].

        Args:
            topk_ids: [T, K] physical routed ids, negative = none. A row without any, as padding has
                none, gets no shared expert either.
            topk_weights: [T, K] float32.
            shared_weight: Of the shared columns.
        """
        ...


@dataclass(frozen=True)
class ExpertParallelPath:
    """The parts that carry a block's tokens to other ranks' experts and back.

    Attributes:
        dispatcher: Sends and returns.
        expand: Appends the shared experts' columns; None: they are not fused, and the router's ids
            are the dispatch space's.
        to_physical: From logical expert ids of any shape, all at least 0, to physical ones: the
            table of an expert-parallel load balancer. None: they are the same.
        record: Called with the physical routed ids [T, K] of each call, negative = none: never with
            a shared slot.
    """

    dispatcher: Dispatcher
    expand: SharedExpander | None = None
    to_physical: Callable[[Tensor], Tensor] | None = None
    record: Callable[[Tensor], object] | None = None
