# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``DeepEPDispatcher``: dispatch and combine by the caller's ``deep_ep.Buffer``.

``deep_ep`` is never imported here: it needs CUDA to be imported at all. What is relied on is the
``Buffer`` of the PyPI package sgl-deep-ep, 0.1.0 to 0.1.2.post1, in the words of its docstrings;
its ``ElasticBuffer`` and ``EPBuffer`` have other methods and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sgl_moe_jit.ep.deepep_contract import broken, parts_of, tensor_of
from sgl_moe_jit.ep.dispatch_checks import (
    check_arguments,
    check_ids_below,
    check_least,
    checked_sums,
)
from sgl_moe_jit.ep.layout import may_read
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.dispatch import DispatchedRows
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops.finalize_arguments import check_int

_METHODS = {
    "normal": ("get_dispatch_layout", "dispatch", "combine"),
    "low_latency": ("low_latency_dispatch", "low_latency_combine"),
}


@dataclass(frozen=True, eq=False)
class _Way:
    """The way back of one dispatch.

    Attributes:
        handle: The buffer's.
        topk_ids: [max(T, 1), J] int64, as dispatched.
        topk_weights: Like them, float32.
        num_tokens: T.
    """

    handle: Any
    topk_ids: Tensor
    topk_weights: Tensor
    num_tokens: int


class DeepEPDispatcher:
    """Expert-parallel dispatch by DeepEP's kernels.

    T tokens of this rank, J slots a token, W ranks, B slots a rank, H hidden size. In both modes
    the sum is made on the way: what comes back is one finished bfloat16 row a token, in the first
    of its J slots. A router's factor that is still due and a shared output are applied to it
    afterwards, with one rounding more.

    - ``"normal"``: a rank sums its experts' weighted rows in float32, rounds once, and the combine
      adds the ranks' rows. The host waits for the device once, but not with ``num_worst_tokens``.
    - ``"low_latency"``: rows arrive grouped by expert in a buffer of fixed size, unweighted; the
      combine weights and adds them. No wait, and it can be captured in a CUDA graph.

    A rank without tokens sends one row without experts, since DeepEP's kernels do not take an empty
    tensor everywhere.

    Args:
        buffer: A ``deep_ep.Buffer`` over the ranks, made with ``low_latency_mode`` for that mode.
        num_local_experts: B, shared slots included; W * B is DeepEP's ``num_experts``.
        mode: ``"normal"`` or ``"low_latency"``.
        num_max_dispatch_tokens_per_rank: Most tokens of a rank; for ``"low_latency"``, the same on
            every rank.
        num_worst_tokens: Most rows a rank can receive; for ``"normal"`` within one node. 0: ask the
            device.
        max_top_k: Most slots a token the buffer's kernels were built for; a shared expert is one
            more than the router's K. None: let them refuse.
        topk_idx_dtype: ``deep_ep.topk_idx_t``.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: one is out of range, missing, or of the other mode.
        UnsupportedError: ``buffer`` lacks a method of the mode, or does not say its group's size.
    """

    takes_deferred = False

    def __init__(
        self,
        buffer: Any,
        num_local_experts: int,
        *,
        mode: Literal["normal", "low_latency"] = "normal",
        num_max_dispatch_tokens_per_rank: int | None = None,
        num_worst_tokens: int = 0,
        max_top_k: int | None = None,
        topk_idx_dtype: torch.dtype = torch.int64,
    ) -> None:
        if not isinstance(mode, str) or mode not in _METHODS:
            raise ValueError(f"mode: expected 'normal' or 'low_latency', got {mode!r}")
        check_least("num_local_experts", num_local_experts, 1)
        if max_top_k is not None:
            check_least("max_top_k", max_top_k, 1)
        check_int("num_worst_tokens", num_worst_tokens, "an int of at most 64 bits")
        if topk_idx_dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"topk_idx_dtype: expected torch.int32 or torch.int64, got {topk_idx_dtype}"
            )
        limit = num_max_dispatch_tokens_per_rank
        if mode == "normal" and limit is not None:
            raise ValueError(
                "num_max_dispatch_tokens_per_rank: expected None in mode 'normal', got "
                f"{limit}; num_worst_tokens is its bound, on the rows received"
            )
        if mode == "low_latency":
            if limit is None:
                raise ValueError(
                    "num_max_dispatch_tokens_per_rank: expected at least 1 in mode 'low_latency', "
                    "got None"
                )
            check_least("num_max_dispatch_tokens_per_rank", limit, 1)
        if num_worst_tokens and (mode != "normal" or num_worst_tokens < 0):
            raise ValueError(
                f"num_worst_tokens: expected 0, or in mode 'normal' more, got {num_worst_tokens}"
            )
        for name in (*_METHODS[mode], "group_size"):
            if not hasattr(buffer, name):
                raise UnsupportedError(
                    f"buffer: expected a deep_ep.Buffer with .{name} for mode {mode!r}, got "
                    f"{type(buffer).__name__}; ElasticBuffer and EPBuffer are not known here"
                )
        self.num_local_experts = num_local_experts
        self.mode = mode
        self._buffer, self._limit, self._worst = buffer, limit, num_worst_tokens
        self._max_top_k, self._ids_dtype = max_top_k, topk_idx_dtype
        self._num_experts = int(buffer.group_size) * num_local_experts

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> DispatchedRows:
        """Send each token to its experts' ranks; see :class:`Dispatcher`.

        Returns:
            Normal: [R, H] rows with [R, J] local ids and their weights. Low latency: [B * M, H], M
            rows an expert, with [B * M, 1] ids (-1 in rows nobody filled) and weights of one.

        Raises:
            TypeError: ``hidden_states`` are not bfloat16, or another dtype does not fit.
            ValueError: shapes disagree, or more tokens or slots than the buffer was made for.
            UnsupportedError: the buffer answers in another form than its contract says.
        """
        check_arguments(hidden_states, topk_ids, topk_weights)
        if hidden_states.dtype != torch.bfloat16:
            raise TypeError(
                f"hidden_states: expected bfloat16 for DeepEP, got {hidden_states.dtype}"
            )
        num_tokens, top_k = topk_ids.shape
        if self._max_top_k is not None and top_k > self._max_top_k:
            raise ValueError(
                f"topk_ids: expected at most max_top_k, {self._max_top_k} slots a token, got "
                f"{top_k}; build DeepEP for more, or do not fuse the shared experts"
            )
        if self._limit is not None and num_tokens > self._limit:
            raise ValueError(
                f"hidden_states: expected at most {self._limit} tokens, "
                f"num_max_dispatch_tokens_per_rank, got {num_tokens}"
            )
        check_ids_below(topk_ids, self._num_experts)
        ids = topk_ids.to(self._ids_dtype)
        if num_tokens == 0:
            hidden_states = hidden_states.new_zeros((1, hidden_states.shape[1]))
            ids, topk_weights = ids.new_full((1, top_k), -1), topk_weights.new_zeros((1, top_k))
        hidden_states, ids = hidden_states.contiguous(), ids.contiguous()
        send = self._normal if self.mode == "normal" else self._low_latency
        rows, topk, handle = send(hidden_states, ids, topk_weights.contiguous())
        return DispatchedRows(rows, topk, _Way(handle, ids, topk_weights.contiguous(), num_tokens))

    def stop(self, device: torch.device) -> None:
        """Do nothing: DeepEP has no way to tell the other ranks, which wait until it times out."""

    def _normal(
        self, x: Tensor, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, StandardTopKOutput, Any]:
        layout = self._buffer.get_dispatch_layout(ids, self._num_experts)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = parts_of("get_dispatch_layout", layout, 5)
        ranks = self._num_experts // self.num_local_experts
        where = "get_dispatch_layout"
        tensor_of(where, "num_tokens_per_rank", per_rank, torch.int32, (ranks,))
        tensor_of(where, "num_tokens_per_expert", per_expert, torch.int32, (self._num_experts,))
        tensor_of(where, "is_token_in_rank", in_rank, torch.bool, (x.shape[0], ranks))
        answer = self._buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=self._worst,
        )
        rows, local, local_weights, _, handle, _ = parts_of("dispatch", answer, 6)
        rows = tensor_of("dispatch", "recv_x", rows, torch.bfloat16, (None, x.shape[1]))
        shape = (rows.shape[0], ids.shape[1])
        local = tensor_of("dispatch", "recv_topk_idx", local, self._ids_dtype, shape)
        local_weights = tensor_of(
            "dispatch", "recv_topk_weights", local_weights, torch.float32, shape
        )
        if may_read(local) and local.numel() and int(local.max()) >= self.num_local_experts:
            expected = f"local expert ids below {self.num_local_experts} in recv_topk_idx"
            broken("dispatch", expected, int(local.max()))
        if handle is None:
            broken("dispatch", "a handle", handle)
        return rows, StandardTopKOutput(local_weights, local), handle

    def _low_latency(
        self, x: Tensor, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, StandardTopKOutput, Any]:
        assert self._limit is not None
        answer = self._buffer.low_latency_dispatch(
            x, ids, self._limit, self._num_experts, use_fp8=False
        )
        rows, counts, handle, _, _ = parts_of("low_latency_dispatch", answer, 5)
        slots, ranks = self.num_local_experts, self._num_experts // self.num_local_experts
        shape = (slots, self._limit * ranks, x.shape[1])
        rows = tensor_of("low_latency_dispatch", "recv_x", rows, torch.bfloat16, shape)
        counts = tensor_of("low_latency_dispatch", "recv_count", counts, torch.int32, (slots,))
        expert = torch.arange(slots, dtype=torch.int32, device=x.device)[:, None]
        place = torch.arange(shape[1], dtype=torch.int32, device=x.device)
        local = torch.where(place < counts[:, None], expert, -1).reshape(-1, 1)
        ones = torch.ones(local.shape, dtype=torch.float32, device=x.device)
        return rows.reshape(-1, shape[2]), StandardTopKOutput(ones, local), handle

    def combine(
        self, expert_output: Tensor | DeferredFinalizeOutput, dispatched: DispatchedRows
    ) -> DeferredFinalizeOutput:
        """Sum the experts' output at the source; see :class:`Dispatcher`.

        Args:
            expert_output: [R, H] bfloat16, finished.
            dispatched: What :meth:`dispatch` returned.

        Raises:
            TypeError, ValueError: ``expert_output`` is of another kind or size.
            UnsupportedError: the buffer answers in another form than its contract says.
        """
        sums = checked_sums(expert_output, dispatched)
        if sums.dtype != torch.bfloat16:
            raise TypeError(f"expert_output: expected bfloat16 for DeepEP, got {sums.dtype}")
        way: _Way = dispatched.handle
        if self.mode == "normal":
            method, count = "combine", 3
            answer = self._buffer.combine(sums, way.handle)
        else:
            method, count = "low_latency_combine", 3
            slots = self.num_local_experts
            grouped = sums.view(slots, -1, sums.shape[1])
            answer = self._buffer.low_latency_combine(
                grouped, way.topk_ids, way.topk_weights, way.handle
            )
        rows = parts_of(method, answer, count)[0]
        shape = (way.topk_ids.shape[0], sums.shape[1])
        rows = tensor_of(method, "combined rows", rows, torch.bfloat16, shape)
        index = torch.full(way.topk_ids.shape, -1, dtype=torch.int32, device=rows.device)
        numbers = torch.arange(shape[0], dtype=torch.int32, device=rows.device)
        index[:, 0] = torch.where((way.topk_ids >= 0).any(1), numbers, -1)
        num_tokens, top_k = way.num_tokens, index.shape[1]
        return DeferredFinalizeOutput(rows[:num_tokens], None, index[:num_tokens], top_k)
