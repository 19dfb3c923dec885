# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Rows between the ranks of a process group, as bytes: any dtype, on NCCL, on gloo, or staged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _gather() -> Callable[..., Any]:
    """Return torch's gather into one tensor, under the name this torch prefers."""
    new = getattr(dist, "all_gather_single", None)
    return dist.all_gather_into_tensor if new is None else new


@dataclass(frozen=True, eq=False)
class Transport:
    """Collectives on rows.

    Attributes:
        group: The ranks.
        through_host: Whether CUDA tensors are copied to the host, sent there and copied back: for
            gloo, and for several ranks on one GPU, which NCCL refuses.
    """

    group: ProcessGroup
    through_host: bool = False

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that the group's backend cannot read.

        Raises:
            ValueError: names the remedy.
        """
        backend = dist.get_backend(self.group)
        if device.type == "cuda" and backend == "gloo" and not self.through_host:
            raise ValueError(
                f"hidden_states: expected a CPU tensor for the gloo group, got device {device}; "
                "make an NCCL group, or pass stage_through_host=True"
            )
        if device.type == "cpu" and backend == "nccl":
            raise ValueError(
                "hidden_states: expected a CUDA tensor for the NCCL group, got a CPU tensor; make "
                "a gloo group"
            )

    def exchange(
        self,
        rows: Tensor,
        send: Sequence[int] | None = None,
        receive: Sequence[int] | None = None,
    ) -> Tensor:
        """Send consecutive rows to each rank, and return what came, in the ranks' order.

        Args:
            rows: [N, C], C at least 1.
            send: Rows for each rank. None: the same for all, as is then ``receive``.
            receive: Rows from each rank.

        Returns:
            [sum(receive), C] like ``rows``; [N, C] without splits.
        """
        sent = self._packed(rows)
        num_rows = sent.shape[0] if receive is None else sum(receive)
        received = sent.new_empty((num_rows, sent.shape[1]))
        dist.all_to_all_single(
            received,
            sent,
            None if receive is None else list(receive),
            None if send is None else list(send),
            group=self.group,
        )
        return self._unpacked(received, rows)

    def gather(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows [W * N, C], N the same on every rank."""
        sent = self._packed(rows)
        received = sent.new_empty((self.group.size() * sent.shape[0], sent.shape[1]))
        _gather()(received, sent, group=self.group)
        return self._unpacked(received, rows)

    def _packed(self, rows: Tensor) -> Tensor:
        sent = rows.contiguous().view(torch.uint8)
        return sent.cpu() if self.through_host else sent

    def _unpacked(self, received: Tensor, like: Tensor) -> Tensor:
        return received.to(like.device).view(like.dtype)
