# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What the ops on top-k ids under expert parallelism check, allocate and differentiate alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import check_int, is_int

MAX_RANKS = 512
"""Most ranks one call can spread over: kMaxRanks in include/sgl_moe_jit/moe/ep_topk_params.h."""
_MOST = 2**31 - 1


def check_kinds(
    tensors: Mapping[str, object],
    optional: Mapping[str, object],
    *,
    shared_weight: object = 1.0,
    **ints: object,
) -> None:
    """Check that each argument is of its kind, which neither C++ nor the schema would name.

    Raises:
        TypeError: names the argument, what was expected and what came.
        ValueError: an int is too large to reach the check of its range.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    for name, x in optional.items():
        if not (x is None or isinstance(x, Tensor)):
            kind = type(x).__name__
            raise TypeError(
                f"{name}: expected a Tensor or None, got {kind}; torch.tensor makes one"
            )
    for name, number in ints.items():
        check_int(name, number, "an int of at most 64 bits")
    if not (isinstance(shared_weight, (float, torch.SymFloat)) or is_int(shared_weight)):
        kind = type(shared_weight).__name__
        raise TypeError(
            f"shared_weight: expected a float, got {kind}; a tensor's would be read back"
        )


def check_counts(
    global_counts: Tensor | None, tokens_per_rank: Tensor | None, world_size: int
) -> None:
    """Check what C++ checks of the counts, where a call has no use for them.

    Else a wrong argument would be an error from some number of rows on only.

    Raises:
        TypeError: a dtype is another.
        ValueError: a shape is another.
    """
    for name, x in (("global_counts", global_counts), ("tokens_per_rank", tokens_per_rank)):
        if x is None:
            continue
        if x.dtype != torch.int64:
            raise TypeError(f"{name}: expected int64, got {x.dtype}")
        if x.shape != (world_size,):
            raise ValueError(f"{name}: expected [world_size={world_size}], got {tuple(x.shape)}")


def check_shape(
    topk_ids: Tensor, num_routed_experts: int, world_size: int, source_rank: int, num_shared: int
) -> None:
    """Check the numbers and what decides the outputs' shapes; the rest is checked in C++.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids: expected [num_tokens, top_k], got {tuple(topk_ids.shape)}")
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size: expected 1 to {MAX_RANKS}, got {world_size}")
    if num_routed_experts < world_size or num_routed_experts % world_size:
        raise ValueError(
            f"num_routed_experts: expected a multiple of world_size, {world_size}, got "
            f"{num_routed_experts}; count the redundant experts too"
        )
    if not 0 <= source_rank < world_size:
        raise ValueError(f"source_rank: expected 0 to {world_size - 1}, got {source_rank}")
    if num_shared < 1:
        raise ValueError(f"num_shared: expected at least 1, got {num_shared}")
    if num_routed_experts + world_size * num_shared > _MOST:
        raise ValueError(
            "num_routed_experts: expected num_routed_experts + world_size * num_shared below 2^31, "
            f"got {num_routed_experts} + {world_size} * {num_shared}"
        )
    if topk_ids.shape[0] * (topk_ids.shape[1] + num_shared) > _MOST:
        raise ValueError(
            "topk_ids: expected num_tokens * (top_k + num_shared) below 2^31, got "
            f"{tuple(topk_ids.shape)}; split the batch"
        )


def outputs(topk_ids: Tensor, topk_weights: Tensor, num_shared: int) -> tuple[Tensor, Tensor]:
    """Return the memory for ids and weights [N, K + S]."""
    shape = (topk_ids.shape[0], topk_ids.shape[1] + num_shared)
    device = topk_ids.device
    return (
        torch.empty(shape, dtype=topk_ids.dtype, device=device),
        torch.empty(shape, dtype=topk_weights.dtype, device=device),
    )


def check_is_cuda(topk_ids: Tensor) -> None:
    """Refuse a device no kernel is built for."""
    if topk_ids.device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"topk_ids: expected a CPU or NVIDIA CUDA tensor, got device {topk_ids.device}"
        )


def check_ids(
    topk_ids: Tensor, num_routed_experts: int, num_token_non_padded: Tensor | None
) -> None:
    """Raise ValueError when a row that is no padding has an id too large. Synchronises on CUDA."""
    if num_token_non_padded is not None:
        topk_ids = topk_ids[: max(0, int(num_token_non_padded))]
    if topk_ids.numel() == 0:
        return
    largest = int(topk_ids.max())
    if largest >= num_routed_experts:
        row = int(topk_ids.reshape(-1).argmax()) // topk_ids.shape[1]
        raise ValueError(
            f"topk_ids: expected ids below {num_routed_experts} (num_routed_experts), got "
            f"{largest} in row {row}; physical experts count the redundant ones too"
        )


def save_sent(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep for the backward pass which slots have an expert."""
    ctx.save_for_backward(output[0])
    ctx.top_k = inputs[0].shape[1]
    ctx.num_inputs = len(inputs)


def weights_gradient(ctx: Any, _: Tensor | None, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradient of ``topk_weights``: that of the slots whose weight was kept."""
    (ids,) = ctx.saved_tensors
    kept = ids[:, : ctx.top_k] >= 0
    return None, torch.where(kept, grad[:, : ctx.top_k], 0), *[None] * (ctx.num_inputs - 2)
