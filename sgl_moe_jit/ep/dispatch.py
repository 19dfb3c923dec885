# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``TorchDispatcher``: dispatch and combine by ``torch.distributed``'s all-to-all.

A token's row travels once to each rank that holds one of its experts, whatever their number there,
with that rank's slots beside it. What comes back is summed by the fused finalize at the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sgl_moe_jit.ep.dispatch_checks import (
    DTYPES,
    as_sent,
    check_arguments,
    check_capacity,
    check_least,
    checked_sums,
    rows_of_pairs,
)
from sgl_moe_jit.ep.dispatch_plan import Targets, read_notices, stopped_notices
from sgl_moe_jit.ep.transport import Transport
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.dispatch import DispatchedRows
from sgl_moe_jit.moe.input_checks import described
from sgl_moe_jit.moe.topk import StandardTopKOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class _Way:
    """The way back of the rows of one dispatch.

    Attributes:
        index: [T, J] int32: which of the rows that come back each slot adds; negative = none.
        weights: [T, J] float32, or None: ones.
        send: Rows returned from here to each rank; None: the same number for all.
        receive: Rows that come back from each rank.
    """

    index: Tensor
    weights: Tensor | None
    send: list[int] | None = None
    receive: list[int] | None = None


class TorchDispatcher:
    """Expert-parallel dispatch over a process group: gloo on CPUs, NCCL on GPUs, one node or more.

    T tokens of this rank, J slots a token, W ranks, B slots a rank, H hidden size.

    Two sums, chosen by ``sum_at``, with the numerics of each stated:

    - ``"source"``: each expert's row comes back by itself and is weighted and summed at the source,
      in float32 and slot order, rounded once. The same expert rows give the same bits as on one
      rank. J rows a token come back at most.
    - ``"experts"``: a rank weights and sums its experts' rows in float32, rounds them once to their
      dtype, and one row for each token and rank comes back; the source adds those in float32 in the
      order of the first slot on each rank and rounds once more: one extra rounding a rank.

    The sizes of what is sent depend on the ids, so that the host waits for the device once a
    dispatch: ``all_to_all_single`` takes them as Python integers. With ``max_tokens_per_rank`` they
    do not: every rank's tokens, padded to that number, go to every rank. Then nothing waits, and it
    can be captured in a CUDA graph; meant for decoding.

    Args:
        group: The ranks.
        num_local_experts: B, the same on every rank.
        sum_at: ``"source"`` or ``"experts"``.
        stage_through_host: Send CUDA tensors through the host's memory: for gloo, and for several
            ranks on one GPU.
        max_tokens_per_rank: C: no rank ever has more tokens. None: any number. Needs
            ``sum_at="experts"``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: one is out of range, or two do not go together.

    Deterministic: the same inputs on all ranks give the same bits.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_local_experts: int,
        *,
        sum_at: Literal["source", "experts"] = "source",
        stage_through_host: bool = False,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        if group is None:  # what WORLD is before init_process_group
            raise TypeError(
                "group: expected a process group, got None; call "
                "torch.distributed.init_process_group, then pass torch.distributed.group.WORLD"
            )
        if not callable(getattr(group, "size", None)) or not callable(getattr(group, "rank", None)):
            raise TypeError(f"group: expected a process group, got {described(group)}")
        check_least("num_local_experts", num_local_experts, 1)
        if not isinstance(stage_through_host, bool):
            raise TypeError(f"stage_through_host: expected a bool, got {stage_through_host!r}")
        if sum_at not in ("source", "experts"):
            raise ValueError(f"sum_at: expected 'source' or 'experts', got {sum_at!r}")
        if max_tokens_per_rank is not None:
            check_least("max_tokens_per_rank", max_tokens_per_rank, 1)
            if sum_at != "experts":
                raise ValueError(
                    "max_tokens_per_rank: expected None with sum_at='source', whose returned rows "
                    f"have no fixed number, got {max_tokens_per_rank}; pass sum_at='experts'"
                )
            if stage_through_host:
                raise ValueError(
                    "max_tokens_per_rank: expected None with stage_through_host, which waits for "
                    f"the device anyway, got {max_tokens_per_rank}"
                )
        self.num_local_experts = num_local_experts
        self.takes_deferred = sum_at == "source"
        self.max_tokens_per_rank = max_tokens_per_rank
        self._transport = Transport(group, stage_through_host)
        self._ranks, self._rank = group.size(), group.rank()
        self._facts: tuple[object, Tensor] | None = None

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> DispatchedRows:
        """Send each token once to every rank that holds one of its experts.

        Args:
            hidden_states: [T, H] bfloat16, float16 or float32; T differs between ranks, and may be
                0 on any of them.
            topk_ids: [T, J] int32 or int64 below W * B, J from 1 to 64. Negative: nothing is sent.
            topk_weights: [T, J] float32.

        Returns:
            [R, H] rows, in order of source rank, then token; [R, J] int32 ids in [0, B), -1 where a
            slot is another rank's; weights with ``sum_at="experts"``, ones else. With
            ``max_tokens_per_rank`` R is W * C.

        Raises:
            TypeError: a dtype is not listed above.
            ValueError: shapes disagree, or the device is not the group's.
            ValueError: on every rank, when they have told each other their sizes: some rank's ids
                are out of range, ranks disagree about H, dtype, J, B or ``sum_at``, or one of them
                stopped: before its dispatch, or at a dtype or shape of its own.
            ValueError: with ``max_tokens_per_rank``, where nobody tells: T exceeds it, or an id is
                out of range, the latter on CUDA with ``SGL_MOE_JIT_CHECK_INDICES=1`` and else sent
                nowhere.

            No row is sent before all of these.
        """
        try:
            check_arguments(hidden_states, topk_ids, topk_weights)
        except (TypeError, ValueError):
            if isinstance(hidden_states, Tensor):
                self.stop(hidden_states.device)
            raise
        self._transport.check_device(hidden_states.device)
        targets = Targets.of(topk_ids, self._ranks, self.num_local_experts)
        if self.max_tokens_per_rank is not None:
            return self._dispatch_to_all(hidden_states, topk_ids, topk_weights, targets)
        told = targets.notices(self._facts_of(hidden_states, topk_ids))
        sent, received = read_notices(told, self._transport.exchange(told))
        send, receive = [n.rows for n in sent], [n.rows for n in received]
        rank, token = targets.rows(sum(send))
        slots = (topk_ids[token] - rank[:, None] * self.num_local_experts).to(torch.int32)
        slots = slots.masked_fill(targets.owner[token] != rank[:, None], -1)
        rows = self._transport.exchange(hidden_states[token], send, receive)
        if self.takes_deferred:
            ids = self._transport.exchange(slots, send, receive)
            weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
            way = _Way(
                targets.index_of_pairs(),
                topk_weights.contiguous(),
                [n.pairs for n in received],
                [n.pairs for n in sent],
            )
        else:
            both = torch.cat((slots, topk_weights[token].view(torch.int32)), dim=1)
            ids, weights = _apart(self._transport.exchange(both, send, receive))
            row_of = rank.new_zeros(targets.hit.shape)
            row_of[token, rank] = torch.arange(token.numel(), device=token.device)
            way = _Way(targets.index_of_sums(row_of), None, receive, send)
        return DispatchedRows(rows, StandardTopKOutput(weights, ids), way)

    def stop(self, device: torch.device) -> None:
        """Tell the other ranks, in place of a dispatch, that there will be none from here.

        Their ``dispatch`` then raises a ValueError that names this rank. With
        ``max_tokens_per_rank`` nobody tells anything, and they wait.
        """
        if self.max_tokens_per_rank is None:
            self._transport.check_device(device)
            self._transport.exchange(stopped_notices(self._ranks, device))

    def _facts_of(self, hidden_states: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's numbers for ``FACTS``, copied to the device when they change."""
        key = (
            hidden_states.shape[1],
            DTYPES.index(hidden_states.dtype),
            topk_ids.shape[1],
            self.num_local_experts,
            int(self.takes_deferred),
        )
        if self._facts is None or self._facts[0] != (key, hidden_states.device):
            tensor = torch.tensor(key, device=hidden_states.device)
            self._facts = (key, hidden_states.device), tensor
        return self._facts[1]

    def _dispatch_to_all(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, targets: Targets
    ) -> DispatchedRows:
        num_tokens, capacity = hidden_states.shape[0], self.max_tokens_per_rank
        assert capacity is not None
        check_capacity(topk_ids, capacity, self._ranks * self.num_local_experts)
        padding = (0, 0, 0, capacity - num_tokens)
        pad = torch.nn.functional.pad
        rows = self._transport.gather(pad(hidden_states, padding))
        owned = topk_ids.to(torch.int32).masked_fill(targets.owner >= self._ranks, -1)
        both = torch.cat(
            (pad(owned, padding, value=-1), pad(topk_weights, padding).view(torch.int32)), dim=1
        )
        ids, weights = _apart(self._transport.gather(both))
        local = ids - self._rank * self.num_local_experts
        local = local.masked_fill((local < 0) | (local >= self.num_local_experts), -1)
        token = torch.arange(num_tokens, device=ids.device)[:, None]
        row_of = torch.arange(self._ranks, device=ids.device) * capacity + token
        way = _Way(targets.index_of_sums(row_of), None)
        return DispatchedRows(rows, StandardTopKOutput(weights, local), way)

    def combine(
        self, expert_output: Tensor | DeferredFinalizeOutput, dispatched: DispatchedRows
    ) -> DeferredFinalizeOutput:
        """Send the experts' output back; finishing what is returned is the sum.

        Args:
            expert_output: Of the rows dispatched: un-finalized with ``sum_at="source"``, [R, H]
                with ``"experts"``.
            dispatched: What :meth:`dispatch` returned.

        Returns:
            Rows as they came back; [T, J] index; weights the router's, or None (ones) with
            ``sum_at="experts"``.

        Raises:
            TypeError: ``expert_output`` is of the other kind, or of a dtype that the dispatched
                rows' does not hold exactly.
            ValueError: it is of another size.
        """
        way: _Way = dispatched.handle
        if self.takes_deferred:
            rows = rows_of_pairs(expert_output, dispatched, way.send)
        else:
            rows = checked_sums(expert_output, dispatched)
        rows = as_sent(rows, dispatched.hidden_states.dtype)
        returned = self._transport.exchange(rows, way.send, way.receive)
        return DeferredFinalizeOutput(returned, way.weights, way.index, way.index.shape[1])


def _apart(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and float32 weights of rows that hold both as int32."""
    ids, bits = both.chunk(2, dim=1)
    return ids.contiguous(), bits.contiguous().view(torch.float32)
