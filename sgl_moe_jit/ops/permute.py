# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_permute``: each token's row copied once for every expert it goes to, grouped by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize import moe_finalize_fuse_shared
from sgl_moe_jit.ops.finalize_arguments import check_int
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    from_dispatcher,
    library,
    refuse_functional_gradients,
)
from sgl_moe_jit.ops.permute_kernel import OP, PermutePath, check_inputs, launch

MAX_EXPERTS = 4096
"""Most experts one call can sort by: one warp's counters must fit in shared memory."""
MAX_ALIGNMENT = 1024
_MAX_ROWS = 2**31 - 1
_MAX_COLUMNS = 65535 * 128  # as in permute_checks.h
_MAX_TOP_K_OF_FINALIZE = 64


def _max_rows(num_slots: int, num_experts: int, alignment: int) -> int:
    """Return a bound on the rows of N slots that needs no look at the ids.

    At most min(N, E) experts have rows, each of them up to ``alignment - 1`` more than slots.
    """
    if alignment == 1:
        return num_slots
    used = torch.sym_min(num_slots, num_experts)
    rows: int = (num_slots + used * (alignment - 1)) // alignment * alignment
    return rows


def _check(hidden_states: Tensor, topk_ids: Tensor, num_experts: int, alignment: int) -> None:
    """Check what decides the outputs' shapes; everything else is checked in C++."""
    if not hidden_states.dtype.is_floating_point or hidden_states.element_size() < 2:
        raise TypeError(
            "hidden_states: expected bfloat16, float16, float32 or float64, "
            f"got {hidden_states.dtype}"
        )
    if hidden_states.dim() != 2:
        raise ValueError(
            f"hidden_states: expected [num_tokens, hidden_dim], got {tuple(hidden_states.shape)}"
        )
    if hidden_states.shape[1] > _MAX_COLUMNS:
        raise ValueError(
            f"hidden_states: expected at most {_MAX_COLUMNS} columns, got {hidden_states.shape[1]}"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"topk_ids: expected [{hidden_states.shape[0]}, top_k], got {tuple(topk_ids.shape)}"
        )
    if topk_ids.numel() > _MAX_ROWS:
        raise ValueError(
            f"topk_ids: expected num_tokens * top_k below 2^31, got {tuple(topk_ids.shape)}; "
            "split the batch"
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"alignment: expected 1 to {MAX_ALIGNMENT}, got {alignment}")
    if _max_rows(topk_ids.numel(), num_experts, alignment) > _MAX_ROWS:
        raise ValueError(
            f"topk_ids: expected below 2^31 rows with padding to {alignment}, got "
            f"{tuple(topk_ids.shape)}; split the batch"
        )


def _outputs(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    device = hidden_states.device
    rows = _max_rows(topk_ids.shape[0] * topk_ids.shape[1], num_experts, alignment)
    return (
        torch.empty((rows, hidden_states.shape[1]), dtype=hidden_states.dtype, device=device),
        torch.empty(topk_ids.shape, dtype=torch.int32, device=device),
        torch.empty((num_experts,), dtype=torch.int32, device=device),
    )


def _functional(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    return permute_on(None, hidden_states, topk_ids, num_experts, alignment)


def permute_on(
    path: PermutePath | None,
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    alignment: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``moe_permute``'s work by a path of the caller's choice: for tests and benchmarks.

    Without gradients and past the dispatcher. ``path`` is of no effect on a CPU; None chooses.

    Raises:
        ValueError: the path cannot serve a call of this size.
    """
    _check(hidden_states, topk_ids, num_experts, alignment)
    check_inputs(hidden_states, topk_ids)
    topk_ids = topk_ids.contiguous()
    outputs = _outputs(hidden_states, topk_ids, num_experts, alignment)
    launch(outputs, hidden_states, topk_ids, alignment, path=path)
    return outputs


def _fake(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    _check(hidden_states, topk_ids, num_experts, alignment)
    return _outputs(hidden_states, topk_ids, num_experts, alignment)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


# row_of never points at padding, so that its gradient counts for nothing.
def _autograd(ctx: Any, grad: Tensor, *unused: Tensor | None) -> tuple[Any, ...]:
    (row_of,) = ctx.saved_tensors
    num_tokens, top_k = row_of.shape
    served = 1 <= top_k <= _MAX_TOP_K_OF_FINALIZE and grad.shape[1] > 0
    if not served or grad.dtype not in (torch.bfloat16, torch.float32):
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(num_tokens, grad.shape[1], dtype=wide, device=grad.device)
        for k in range(top_k if grad.shape[0] else 0):
            present = (row_of[:, k] >= 0)[:, None]
            term = grad[row_of[:, k].clamp(min=0).long()].to(wide)
            total = total + term.masked_fill(~present, 0)
        return total.to(grad.dtype), None, None, None
    ones = torch.ones(row_of.shape, dtype=torch.float32, device=grad.device)
    total = moe_finalize_fuse_shared(grad.contiguous(), row_of, ones, None, top_k)
    return total, None, None, None


library.define(
    f"{OP}(Tensor hidden_states, Tensor topk_ids, SymInt num_experts, int alignment=1)"
    " -> (Tensor, Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
)


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, *, alignment: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, rows grouped by expert.

    ``permuted_hidden[expanded_idx_to_permuted_idx[t, k]] = hidden_states[t]``. Rows are in expert
    order, and in slot order (``t * K + k``) within an expert. With an ``alignment`` of A, an
    expert's rows begin at a multiple of A and are filled up with rows of zeros to the next one:
    what a block-scaled grouped GEMM, whose tiles may not straddle two experts, asks for. An expert
    without slots has no rows.

    T tokens, K experts a token, E experts, H hidden size, N = T * K slots.

    Args:
        hidden_states: [T, H] bfloat16, float16, float32 or float64, adjacent columns, any row
            stride.
        topk_ids: [T, K] int32 or int64, N below 2^31. Negative, or at or above ``num_experts``: no
            expert here, and no row.
        num_experts: E, 1 to 4096.
        alignment: A, 1 to 1024, any integer.

    Returns:
        ``permuted_hidden`` [P, H] like ``hidden_states``. P, the same for all ids, is N rounded as
        the worst ids need: ``(N + min(N, E) * (A - 1)) // A * A``, N itself without an alignment.
        Rows at and beyond ``expert_offsets[-1]`` are **not written** and hold whatever was there,
        NaN included; all rows below it are a token's or zero.
        ``expanded_idx_to_permuted_idx`` [T, K] int32: each slot's row, -1 where it has none.
        ``expert_offsets`` [E] int32: the end of each expert's rows with its padding, multiples of
        A, as ``torch.nn.functional.grouped_mm`` takes them. An expert's rows begin where the one
        before it ends; how many of them are a token's, ``expert_row_counts`` says.
        Copies of bits: the same on every run and device. Neither synchronises nor reads back, so
        that it can be captured in a CUDA graph.

    Raises:
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes disagree, N, P, ``num_experts`` or ``alignment`` is out of range, columns
            are not adjacent, or devices differ.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``hidden_states``: the sum over k of the gradient's rows, in float32 or wider,
    rounded once. The gradient of padding is ignored. ``torch.export`` needs to know that T is
    bounded: ``Dim("T", max=...)``, ``Dim.AUTO`` or ``Dim.DYNAMIC``.

    Cost: ``S * H * (T * (1 + K) + padding)`` bytes and a few a slot, S the item size; no flops.
    Source: include/sgl_moe_jit/moe/permute.cuh, permute_one_launch.cuh, csrc/moe/permute_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_permute.moe_permute.
    """
    for name, x in (("hidden_states", hidden_states), ("topk_ids", topk_ids)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    check_int("num_experts", num_experts, f"1 to {MAX_EXPERTS}")
    check_int("alignment", alignment, f"1 to {MAX_ALIGNMENT}")
    refuse_functional_gradients("moe_permute", hidden_states)
    direct = can_bypass_dispatcher(hidden_states, topk_ids)
    function = _functional if direct else torch.ops.sgl_moe_jit.moe_permute
    result: tuple[Tensor, Tensor, Tensor] = function(
        hidden_states, topk_ids, num_experts, alignment
    )
    return result


def expert_row_counts(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Return how many slots each expert has: its rows in ``moe_permute``, padding left out.

    A few torch operations, without a synchronisation; only who has to tell an aligned expert's
    rows from its padding needs them.

    Args:
        topk_ids: Integers of any shape; outside [0, num_experts) means no expert.
        num_experts: E.

    Returns:
        [E] int32. Integer sums: the same on every run and device.

    Raises:
        TypeError: ``topk_ids`` are not integers, or ``num_experts`` is no int.
        ValueError: ``num_experts`` is below 1.
    """
    if not isinstance(topk_ids, Tensor):
        raise TypeError(f"topk_ids: expected a Tensor, got {type(topk_ids).__name__}")
    if topk_ids.is_floating_point() or topk_ids.is_complex() or topk_ids.dtype == torch.bool:
        raise TypeError(f"topk_ids: expected integers, got {topk_ids.dtype}")
    check_int("num_experts", num_experts, "at least 1")
    if num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1, got {num_experts}")
    ids = topk_ids.reshape(-1)
    present = (ids >= 0) & (ids < num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids.masked_fill(~present, 0).long(), present.int())
