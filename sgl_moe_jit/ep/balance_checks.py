# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a ``WaterfillBalancer`` checks of its arguments, and finds out from wrong ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.ops.finalize_arguments import check_int


def device_of(*arguments: object) -> torch.device:
    """Return the device of the first tensor."""
    return next((x.device for x in arguments if isinstance(x, Tensor)), torch.device("cpu"))


def columns_of(*arguments: object) -> int | None:
    """Return K of the first tensor of two dimensions; None: there is none."""
    return next((x.shape[1] for x in arguments if isinstance(x, Tensor) and x.dim() == 2), None)


def check_capacity(capacity: int, dynamic: bool, mode: str, min_tokens: int) -> None:
    """Refuse a ``max_tokens_per_rank`` that is none, or does not go with the rest.

    Raises:
        TypeError, ValueError: names the argument.
    """
    check_int("max_tokens_per_rank", capacity, "an int of at most 64 bits")
    if capacity < 1:
        raise ValueError(f"max_tokens_per_rank: expected at least 1, got {capacity}")
    if not dynamic or mode != "exact_restricted" or min_tokens:
        raise ValueError(
            "max_tokens_per_rank: expected dynamic=True, mode='exact_restricted' and min_tokens=0 "
            f"with it, got dynamic={dynamic}, mode={mode!r} and min_tokens={min_tokens}; exact "
            "meets its quotas by counts alone"
        )


def check_group(group: dist.ProcessGroup | None, layout: EpLayout, rank: int) -> None:
    """Refuse a group of another size or order than the layout's ranks.

    Raises:
        TypeError: it is no group.
        ValueError: says so, or that there is no group yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group: expected an initialised torch.distributed for dynamic=True, got none; call "
            "torch.distributed.init_process_group first"
        )
    try:
        size, place = dist.get_world_size(group), dist.get_rank(group)
    except (AttributeError, TypeError) as error:
        kind = type(group).__name__
        raise TypeError(f"group: expected a ProcessGroup or None, got {kind}") from error
    if (size, place) != (layout.ep_size, rank):
        raise ValueError(
            f"group: expected {layout.ep_size} ranks with this one as {rank}, got {size} with this "
            f"one as {place}"
        )
