# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``WaterfillBalancer``: top-k ids made ready for dispatch, shared experts sent where room is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout, check_layout
from sgl_moe_jit.ops import count_tokens_per_rank, waterfill_topk_with_shared_expert
from sgl_moe_jit.ops.finalize_arguments import check_int
from sgl_moe_jit.ops.waterfill import MIN_TOKENS


class WaterfillBalancer:
    """Adds to each token's routed experts its shared expert, on a rank that levels the loads.

    Static: each source levels the pairs it sends itself, and asks nobody. That is level over all
    sources as far as they route alike or their differences cancel; each starts with another rank
    for what does not divide. Dynamic: one all-reduce of [2, W] int64 a call tells every source what
    all send; in mode ``exact`` the sources then meet one set of quotas together. Neither
    synchronises with the host, so that both can be captured in a CUDA graph (dynamic: with a
    backend whose collectives can, such as NCCL).

    Attributes:
        layout: The ranks' slots, one of them shared.
        rank: Of this process, home of its tokens.
        mode: ``exact``, ``exact_restricted`` or ``sampled``.
        group: The ranks' process group, of a dynamic balancer; None: the default group.
        dynamic: Whether the loads of all sources count.
        min_tokens: Rows below which shared experts stay home.
        remainder_start: The first rank to get one of the tokens that do not divide.
    """

    def __init__(
        self,
        layout: EpLayout,
        rank: int,
        *,
        mode: str = "exact",
        group: dist.ProcessGroup | None = None,
        dynamic: bool = False,
        min_tokens: int | None = None,
        remainder_start: int | None = None,
    ) -> None:
        """Check the choices; nothing is compiled or sent.

        Args:
            layout: With one shared slot a rank.
            rank: 0 to ``layout.ep_size - 1``.
            mode: As of ``waterfill_topk_with_shared_expert``.
            group: For a dynamic balancer, as large as the layout, with this rank in its place.
            dynamic: See above.
            min_tokens: None: 64 in ``sampled``, 0 otherwise. In a dynamic balancer, a source below
                it takes part in the count and keeps its shared experts, which the others do not
                know: 0 is the number with which the quotas are met.
            remainder_start: None: ``rank`` in a static balancer, 0 in a dynamic one, whose sources
                must all have the same.

        Raises:
            TypeError: an argument is of another kind.
            ValueError: a number or mode is out of range, the layout has not one shared slot a rank,
                a static balancer was given a group, or a dynamic one a group of another size or
                order, or none while ``torch.distributed`` is not initialised.
        """
        check_layout(layout)
        if layout.num_shared != 1:
            raise ValueError(
                f"layout: expected num_shared=1, got {layout.num_shared}; with more, use "
                "expand_topk_with_shared_expert, which keeps them home"
            )
        layout.check_rank(rank)
        if not isinstance(mode, str) or mode not in MIN_TOKENS:
            raise ValueError(f"mode: expected one of {', '.join(MIN_TOKENS)}, got {mode!r}")
        if not isinstance(dynamic, bool):
            raise TypeError(f"dynamic: expected a bool, got {dynamic!r}")
        if remainder_start is None:
            remainder_start = 0 if dynamic else rank
        layout.check_rank(remainder_start, "remainder_start")
        if min_tokens is None:
            min_tokens = MIN_TOKENS[mode]
        check_int("min_tokens", min_tokens, "an int of at most 64 bits")
        if min_tokens < 0:
            raise ValueError(f"min_tokens: expected at least 0, got {min_tokens}")
        if dynamic:
            _check_group(group, layout, rank)
        elif group is not None:
            raise ValueError(
                "group: expected None without dynamic=True; a static balancer asks nobody"
            )
        self.layout = layout
        self.rank = rank
        self.mode = mode
        self.group = group
        self.dynamic = dynamic
        self.min_tokens = min_tokens
        self.remainder_start = remainder_start

    def __call__(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared_weight: float = 1.0,
        num_token_non_padded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ids of the dispatch space and weights, the shared expert in the last column.

        A dynamic balancer joins its group's all-reduce exactly once a call, with no tokens too, and
        with arguments that it then refuses: all ranks of the group must call.

        Args:
            topk_ids: [N, K] int32 or int64 physical experts; negative: none.
            topk_weights: [N, K] float32, bfloat16 or float16.
            shared_weight: Of the shared column: see ``fused_shared_expert_weight``.
            num_token_non_padded: One int32 or int64 on the same device, or None: rows from it on
                are padding.

        Returns:
            [N, K + 1] each, as of ``waterfill_topk_with_shared_expert``. Deterministic.

        Raises:
            TypeError, ValueError: as of ``waterfill_topk_with_shared_expert``.
        """
        numbers = (self.layout.num_physical, self.layout.ep_size, self.rank)
        counts: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.dynamic:
            # sglang's count has the padded rows of each source; here padding is nobody's token.
            try:
                total = count_tokens_per_rank(
                    topk_ids, *numbers, num_token_non_padded=num_token_non_padded
                )
            except Exception:
                # The others are in the all-reduce, and what is wrong may be this rank's alone.
                device = topk_ids.device if isinstance(topk_ids, Tensor) else None
                nothing = torch.zeros((2, numbers[1]), dtype=torch.int64, device=device)
                dist.all_reduce(nothing, group=self.group)
                raise
            dist.all_reduce(total, group=self.group)
            counts = (total[0], total[1])
        return waterfill_topk_with_shared_expert(
            topk_ids,
            topk_weights,
            *numbers,
            shared_weight,
            mode=self.mode,
            global_counts=counts[0],
            tokens_per_rank=counts[1],
            remainder_start=self.remainder_start,
            min_tokens=self.min_tokens,
            num_token_non_padded=num_token_non_padded,
        )


def _check_group(group: dist.ProcessGroup | None, layout: EpLayout, rank: int) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group: expected an initialised torch.distributed for dynamic=True, got none; call "
            "torch.distributed.init_process_group first"
        )
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if (size, place) != (layout.ep_size, rank):
        raise ValueError(
            f"group: expected {layout.ep_size} ranks with this one as {rank}, got {size} with this "
            f"one as {place}"
        )
