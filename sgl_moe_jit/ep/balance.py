# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``WaterfillBalancer``: top-k ids made ready for dispatch, shared experts sent where room is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_moe_jit.ep.balance_checks import check_capacity, check_group, columns_of, device_of
from sgl_moe_jit.ep.layout import EpLayout, check_layout
from sgl_moe_jit.ep.transport import Transport
from sgl_moe_jit.moe.topk_selection import padded_rows
from sgl_moe_jit.ops import count_tokens_per_rank, ep_topk, waterfill_topk_with_shared_expert
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

    What static cannot do: pouring on the lowest ranks leaves a source's own load as even as its
    tokens allow, but what is left uneven adds up over the sources, and none of them sees the sum.
    In the simulator static ``exact`` ends up to 1.10 of the bound at 128 tokens a rank and 1.12 at
    16, dynamic ``exact`` at the bound (docs/expert_parallel.md).

    Dynamic ``exact_restricted`` knows the loads of all sources, not which ranks their tokens may
    take. That costs a few rows where tokens are few: 1.05 of the best there is at 16 tokens a rank,
    1.07 at 4. With ``max_tokens_per_rank`` the sources exchange their choices, one all-gather of
    [W * C, K] int32 ids, and each runs the one greedy pass over all tokens, 1.01 of the best. It
    can be captured too. Meant for decoding, since every source passes over W * C rows.

    Attributes:
        layout: The ranks' slots, one of them shared.
        rank: Of this process, home of its tokens.
        mode: ``exact``, ``exact_restricted`` or ``sampled``.
        group: The ranks' process group, of a dynamic balancer; None: the default group.
        dynamic: Whether the loads of all sources count.
        min_tokens: Rows below which shared experts stay home.
        remainder_start: The first rank to get one of the tokens that do not divide.
        max_tokens_per_rank: C, where the sources exchange choices; None: counts.
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
        max_tokens_per_rank: int | None = None,
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
            max_tokens_per_rank: C, in a dynamic balancer of mode ``exact_restricted``, the same on
                all ranks, whose K then has to be the same too. None: any number.

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
        if max_tokens_per_rank is not None:
            check_capacity(max_tokens_per_rank, dynamic, mode, min_tokens)
        if dynamic:
            check_group(group, layout, rank)
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
        self.max_tokens_per_rank = max_tokens_per_rank
        self._top_k: int | None = None  # of the last call that exchanged choices

    def __call__(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared_weight: float = 1.0,
        num_token_non_padded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ids of the dispatch space and weights, the shared expert in the last column.

        A dynamic balancer joins its group's collective exactly once a call, with no tokens too, and
        with arguments that it then refuses: all ranks of the group must call, or :meth:`stop`. Only
        where choices are exchanged and K is not known, from either argument or an earlier call,
        does it refuse without joining.

        Args:
            topk_ids: [N, K] int32 or int64 physical experts; negative: none.
            topk_weights: [N, K] float32, bfloat16 or float16.
            shared_weight: Of the shared column: see ``fused_shared_expert_weight``.
            num_token_non_padded: One int32 or int64 on the same device, or None: rows from it on
                are padding.

        Returns:
            [N, K + 1] each, as of ``waterfill_topk_with_shared_expert``. Deterministic.

        Raises:
            TypeError, ValueError: as of ``waterfill_topk_with_shared_expert``; or N exceeds
                ``max_tokens_per_rank``. With it, an id out of range on one rank is an error on all.
        """
        if self.max_tokens_per_rank is not None:
            return self._by_choices(topk_ids, topk_weights, shared_weight, num_token_non_padded)
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
                self.stop(device_of(topk_ids, topk_weights, num_token_non_padded))
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

    def stop(self, device: torch.device, top_k: int | None = None) -> bool:
        """Join the others' collective without tokens, in place of a call.

        For a rank that an error has stopped before its call, so that the others do not wait. A
        static balancer has nobody to join. An exchange of choices needs to know K: where it is
        neither given nor known from an earlier call, nothing is joined, and the others wait until
        their group times out.

        Args:
            device: Of the tokens.
            top_k: K; None: of the last call.

        Returns:
            Whether the others go on, to their dispatch.
        """
        if self.max_tokens_per_rank is not None:
            top_k = self._top_k if top_k is None else top_k
            if top_k is None:
                return False
            shape = (self.max_tokens_per_rank, top_k)
            self._gather(torch.full(shape, -1, dtype=torch.int32, device=device))
        elif self.dynamic:
            nothing = torch.zeros((2, self.layout.ep_size), dtype=torch.int64, device=device)
            dist.all_reduce(nothing, group=self.group)
        return True

    def _by_choices(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared_weight: float,
        num_token_non_padded: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the greedy pass over the tokens of all sources, and return the rows of this one."""
        layout, capacity = self.layout, self.max_tokens_per_rank
        assert capacity is not None
        try:
            choices = self._choices(topk_ids, topk_weights, num_token_non_padded, capacity)
        except Exception:
            # The others are in the all-gather, and what is wrong may be this rank's alone.
            device = device_of(topk_ids, topk_weights, num_token_non_padded)
            self.stop(device, columns_of(topk_ids, topk_weights))
            raise
        everybody = self._gather(choices)
        mine = slice(self.rank * capacity, self.rank * capacity + topk_ids.shape[0])
        weights = topk_weights.new_zeros(everybody.shape)
        weights[mine] = topk_weights
        ids, weights = waterfill_topk_with_shared_expert(
            everybody,
            weights,
            layout.num_physical,
            layout.ep_size,
            0,  # all ranks as one source: the same pass everywhere
            shared_weight,
            mode=self.mode,
        )
        return ids[mine].to(topk_ids.dtype), weights[mine]

    def _choices(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_token_non_padded: Tensor | None,
        capacity: int,
    ) -> Tensor:
        """Return this source's ids, [C, K] int32 whatever theirs are, -1 where it has no token."""
        ep_topk.check_kinds({"topk_ids": topk_ids, "topk_weights": topk_weights}, {})
        ep_topk.check_shape(topk_ids, self.layout.num_physical, self.layout.ep_size, self.rank, 1)
        num_tokens, top_k = topk_ids.shape
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_ids: expected int32 or int64, got {topk_ids.dtype}")
        if num_tokens > capacity:
            raise ValueError(
                f"topk_ids: expected at most max_tokens_per_rank, {capacity} rows, got {num_tokens}"
            )
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"topk_weights: expected the shape of topk_ids, {tuple(topk_ids.shape)}, got "
                f"{tuple(topk_weights.shape)}"
            )
        valid = topk_ids
        if num_token_non_padded is not None:
            valid = valid.masked_fill(padded_rows(valid, num_token_non_padded, "topk_ids"), -1)
        if valid.dtype == torch.int64:  # what int32 has no number for stays none, or out of range
            valid = valid.clamp(-1, torch.iinfo(torch.int32).max)
        choices = topk_ids.new_full((capacity, top_k), -1, dtype=torch.int32)
        choices[:num_tokens] = valid
        self._top_k = top_k
        return choices

    def _gather(self, choices: Tensor) -> Tensor:
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        # Which CUDA collectives gloo has differs between versions of torch.
        through_host = choices.is_cuda and dist.get_backend(group) == "gloo"
        return Transport(group, through_host).gather(choices)
