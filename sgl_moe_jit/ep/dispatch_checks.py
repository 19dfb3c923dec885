# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What goes into a dispatch and a combine, looked at before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.ep.dispatch_plan import true_places
from sgl_moe_jit.ep.layout import may_read
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.dispatch import DispatchedRows
from sgl_moe_jit.ops.finalize_arguments import check_int

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of rows; ranks tell each other the place in this list."""
_MAX_TOP_K = 64  # the finalize's


def check_least(name: str, number: object, least: int) -> None:
    """Check a number that a dispatcher is made with.

    Raises:
        TypeError: it is no int.
        ValueError: it is below ``least``.
    """
    check_int(name, number, f"at least {least}")
    if number < least:  # type: ignore[operator]
        raise ValueError(f"{name}: expected at least {least}, got {number}")


def check_arguments(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Check kinds and shapes; the ids themselves are looked at with the counts.

    Raises:
        TypeError: a kind or a dtype.
        ValueError: a shape or a device.
    """
    for name, x in (
        ("hidden_states", hidden_states),
        ("topk_ids", topk_ids),
        ("topk_weights", topk_weights),
    ):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
        if x.device != hidden_states.device:
            raise ValueError(
                f"{name}: expected device {hidden_states.device} of hidden_states, got {x.device}; "
                "move it with .to()"
            )
    if hidden_states.dtype not in DTYPES:
        raise TypeError(
            f"hidden_states: expected bfloat16, float16 or float32, got {hidden_states.dtype}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids: expected int32 or int64, got {topk_ids.dtype}")
    if topk_weights.dtype != torch.float32:
        raise TypeError(
            f"topk_weights: expected float32, got {topk_weights.dtype}; a shared expert's "
            "weight of 1 / factor loses the factor in a narrower one"
        )
    if hidden_states.dim() != 2 or hidden_states.shape[1] < 1:
        raise ValueError(
            f"hidden_states: expected [num_tokens, hidden], got {tuple(hidden_states.shape)}"
        )
    num_tokens = hidden_states.shape[0]
    if (
        topk_ids.dim() != 2
        or topk_ids.shape[0] != num_tokens
        or not 1 <= topk_ids.shape[1] <= _MAX_TOP_K
    ):
        raise ValueError(
            f"topk_ids: expected [{num_tokens}, 1 to {_MAX_TOP_K}], got {tuple(topk_ids.shape)}"
        )
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights: expected {tuple(topk_ids.shape)}, got {tuple(topk_weights.shape)}"
        )


def check_capacity(topk_ids: Tensor, max_tokens: int, total: int) -> None:
    """Check what a dispatch of a fixed size relies on.

    Args:
        topk_ids: [T, J].
        max_tokens: Most tokens of a rank.
        total: Slots of all ranks, W * B.

    Raises:
        ValueError: more tokens; or an id out of range, on a CPU and with
            ``SGL_MOE_JIT_CHECK_INDICES=1``: looking at it takes a synchronisation.
    """
    if topk_ids.shape[0] > max_tokens:
        raise ValueError(
            f"hidden_states: expected at most max_tokens_per_rank, {max_tokens} tokens, got "
            f"{topk_ids.shape[0]}"
        )
    check_ids_below(topk_ids, total)


def check_ids_below(topk_ids: Tensor, total: int) -> None:
    """Check ids against the slots of all ranks where they may be read; see ``may_read``.

    Raises:
        ValueError: an id out of range.
    """
    if may_read(topk_ids) and topk_ids.numel() and int(topk_ids.max()) >= total:
        raise ValueError(
            f"topk_ids: expected ids below {total}, ep_size * num_local_experts, got "
            f"{int(topk_ids.max())}"
        )


def checked_sums(
    expert_output: Tensor | DeferredFinalizeOutput, dispatched: DispatchedRows
) -> Tensor:
    """Return the experts' sums, if that is what they are.

    Raises:
        TypeError: un-finalized rows.
        ValueError: another size.
    """
    if not isinstance(expert_output, Tensor):
        raise TypeError(
            "expert_output: expected a tensor [R, H], since the experts' rank sums, got "
            f"{type(expert_output).__name__}; call the experts with defer=False"
        )
    expected = dispatched.hidden_states.shape
    if expert_output.shape != expected:
        raise ValueError(
            f"expert_output: expected {tuple(expected)}, got {tuple(expert_output.shape)}"
        )
    return expert_output


def as_sent(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows in the dtype that was dispatched: the other ranks count on its bytes.

    Raises:
        TypeError: they would have to be rounded.
    """
    if rows.dtype == dtype:
        return rows
    if not rows.is_floating_point() or torch.promote_types(rows.dtype, dtype) != dtype:
        raise TypeError(
            f"expert_output: expected {dtype} like the dispatched rows, got {rows.dtype}; convert "
            "it with .to()"
        )
    return rows.to(dtype)


def rows_of_pairs(
    expert_output: Tensor | DeferredFinalizeOutput,
    dispatched: DispatchedRows,
    send: list[int] | None,
) -> Tensor:
    """Return one row for each slot that was dispatched, in slot order.

    Args:
        expert_output: The experts' rows, un-finalized.
        dispatched: What they were made of.
        send: How many of them go to each rank.

    Raises:
        TypeError: finished sums.
        ValueError: an index of another size, or on a CPU one without a row for some slot.
    """
    if not isinstance(expert_output, DeferredFinalizeOutput):
        raise TypeError(
            "expert_output: expected a DeferredFinalizeOutput, since the source sums, got "
            f"{type(expert_output).__name__}; call the experts with defer=True"
        )
    assert send is not None
    hidden, ids = dispatched.hidden_states, dispatched.topk_output.topk_ids
    index = expert_output.expanded_idx_to_permuted_idx.reshape(-1)
    if index.numel() != ids.numel():
        raise ValueError(
            f"expert_output: expected an index of {ids.numel()} slots, {tuple(ids.shape)}, got "
            f"{index.numel()}"
        )
    row = index[true_places(ids.reshape(-1) >= 0, sum(send))]
    if row.device.type == "cpu" and bool((row < 0).any()):
        raise ValueError(
            "expert_output: expected a row for each slot that was dispatched, and some have none"
        )
    return expert_output.gemm2_out[row.long()][:, : hidden.shape[1]]
