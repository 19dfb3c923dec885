# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``waterfill_topk_with_shared_expert``: each token's shared expert sent where there is room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops import ep_topk
from sgl_moe_jit.ops.expand_topk import expand_topk_with_shared_expert
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    from_dispatcher,
    library,
    refuse_functional_gradients,
)
from sgl_moe_jit.ops.waterfill_kernel import (
    MODES,
    OP,
    WaterfillCall,
    WaterfillPath,
    check_inputs,
    launch,
)

MIN_TOKENS = {"exact": 0, "exact_restricted": 0, "sampled": 64}
"""Rows below which all shared experts stay home, by mode, unless the caller says otherwise."""


def _check(call: WaterfillCall) -> None:
    """Check what C++ cannot see or what decides the outputs' shapes."""
    ep_topk.check_shape(call.topk_ids, *call.numbers, 1)
    if not isinstance(call.mode, str) or call.mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {call.mode!r}")
    if (call.global_counts is None) != (call.tokens_per_rank is None):
        missing = "global_counts" if call.global_counts is None else "tokens_per_rank"
        raise ValueError(
            f"{missing}: expected a Tensor, got None; global_counts and tokens_per_rank come "
            "together, as the rows of an all-reduced count_tokens_per_rank"
        )
    last = call.world_size - 1
    if not 0 <= call.remainder_start <= last:
        raise ValueError(f"remainder_start: expected 0 to {last}, got {call.remainder_start}")


def waterfill_on(path: WaterfillPath | None, call: WaterfillCall) -> tuple[Tensor, Tensor]:
    """Do the op's work by a path of the caller's choice: for tests and benchmarks.

    Without gradients and past the dispatcher. ``path`` is of no effect on a CPU; None chooses.

    Raises:
        ValueError: the path cannot serve a call of this size.
    """
    _check(call)
    check_inputs(call)
    ids, weights = call.topk_ids.contiguous(), call.topk_weights.contiguous()
    out = ep_topk.outputs(ids, weights, 1)
    launch(out, call._replace(topk_ids=ids, topk_weights=weights), path=path)
    return out


def _functional(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return waterfill_on(None, WaterfillCall(*args, **kwargs))


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = WaterfillCall(*args, **kwargs)
    _check(call)
    return ep_topk.outputs(call.topk_ids, call.topk_weights, 1)


library.define(
    f"{OP}(Tensor topk_ids, Tensor topk_weights, int num_routed_experts, int world_size, "
    'int source_rank, float shared_weight=1.0, str mode="exact", Tensor? global_counts=None, '
    "Tensor? tokens_per_rank=None, int remainder_start=0, Tensor? num_token_non_padded=None)"
    " -> (Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", ep_topk.weights_gradient, setup_context=ep_topk.save_sent, lib=library
)


def waterfill_topk_with_shared_expert(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    shared_weight: float = 1.0,
    *,
    mode: str = "exact",
    global_counts: Tensor | None = None,
    tokens_per_rank: Tensor | None = None,
    remainder_start: int = 0,
    min_tokens: int | None = None,
    num_token_non_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Number routed ids for dispatch, and send each token's shared expert where there is room.

    As ``expand_topk_with_shared_expert`` with one shared slot a rank, but for the rank of the
    shared column. The load of a rank is the (token, expert) pairs that its routed experts get; a
    shared expert adds 1.

    - ``exact``: whole-number quotas that level the ranks: what each gets when all tokens are poured
      on the lowest loads. No rank ends above the larger of the highest load and the mean of all
      work rounded up. Those tokens of equal claim that do not divide go to ranks in the order of
      ``(rank - remainder_start) mod W``. As many tokens as the home rank's quota holds stay home,
      evenly spread over the rows; the others are dealt to the ranks in an even mix, not in runs.
    - ``exact_restricted``: only ranks that the token goes to anyway, so that no token is sent
      anywhere more often. One greedy pass over chunks of 256 rows, to the lowest load: no bound
      that holds for all inputs, but at most 1.02 of the best choice there is, or one token, on
      routings tried (uniform and skewed; top_k 6 and 8 on 2 to 72 ranks, 4 on 16, 2 on 8). With
      two experts a token on more ranks there is less to choose from: up to 1.06 on 32 and 1.10 on
      64.
    - ``sampled``: sglang 0.5.23's rule, bit for bit: a hash of row and source draws a rank with a
      chance by how far it is below the level. Loads scatter around the level.

    Without ``global_counts`` each source levels its own tokens, with it all sources together. In
    mode ``exact`` all sources that pass the same counts then meet one set of quotas exactly: each
    knows its share from the tokens of the sources before it.

    N tokens, K experts a token, E routed experts, W ranks.

    Args:
        topk_ids: [N, K] int32 or int64 physical experts, N * (K + 1) below 2^31; negative: none.
        topk_weights: [N, K] float32, bfloat16 or float16.
        num_routed_experts: E, redundant experts included; a multiple of W.
        world_size: W, 1 to 512, any number.
        source_rank: The rank these tokens are on, their home.
        shared_weight: Weight of the shared column.
        mode: See above.
        global_counts: [W] int64 on the same device: pairs of all sources by rank. With
            ``tokens_per_rank``: the two rows of ``count_tokens_per_rank``, summed over all sources.
        tokens_per_rank: [W] int64: tokens of each source; their sum below 2^31.
        remainder_start: 0 to W - 1. Sources that level their own tokens should each start at
            another rank, say their own, or all put their remainder on the same ranks.
        min_tokens: With fewer rows (N, padding included) all shared experts stay home. None: 64 in
            ``sampled``, as there, and 0 otherwise.
        num_token_non_padded: One int32 or int64 on the same device, or None: rows from it on are
            padding.

    Returns:
        Ids and weights [N, K + 1] as of ``expand_topk_with_shared_expert``, new tensors, every item
        written. Integers only: the same on every run, device and path. Neither synchronises nor
        reads back, so that it can be captured in a CUDA graph, the counts' values changing between
        replays.

    Raises:
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes or devices disagree, a number is out of range, or only one of
            ``global_counts`` and ``tokens_per_rank`` is there. An id at or above E: as of
            ``expand_topk_with_shared_expert``; without a check it counts for the last rank.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Counts that do not agree with the ids give an unlevel choice, never an id that is no slot.
    Gradients flow to ``topk_weights``.

    Cost: one launch up to 768 rows and 8192 ids (256 rows in ``exact_restricted``), else three;
    some 20 integer operations an id, and ``exact_restricted`` 256 dependent steps a chunk.
    Source: include/sgl_moe_jit/moe/waterfill.cuh, csrc/moe/waterfill_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_waterfill.
    """
    ep_topk.check_kinds(
        {"topk_ids": topk_ids, "topk_weights": topk_weights},
        {
            "num_token_non_padded": num_token_non_padded,
            "global_counts": global_counts,
            "tokens_per_rank": tokens_per_rank,
        },
        shared_weight=shared_weight,
        num_routed_experts=num_routed_experts,
        world_size=world_size,
        source_rank=source_rank,
        remainder_start=remainder_start,
        min_tokens=0 if min_tokens is None else min_tokens,
    )
    call = WaterfillCall(
        topk_ids,
        topk_weights,
        num_routed_experts,
        world_size,
        source_rank,
        float(shared_weight),
        mode,
        global_counts,
        tokens_per_rank,
        remainder_start,
        num_token_non_padded,
    )
    _check(call)
    if min_tokens is not None and min_tokens < 0:
        raise ValueError(f"min_tokens: expected at least 0, got {min_tokens}")
    if topk_ids.shape[0] < (MIN_TOKENS[mode] if min_tokens is None else min_tokens):
        ep_topk.check_counts(global_counts, tokens_per_rank, world_size)
        return expand_topk_with_shared_expert(
            topk_ids,
            topk_weights,
            *call.numbers,
            shared_weight,
            num_token_non_padded=num_token_non_padded,
        )
    refuse_functional_gradients(OP, topk_weights)
    counts = (global_counts, tokens_per_rank)
    if can_bypass_dispatcher(topk_ids, topk_weights, *counts, num_token_non_padded):
        return waterfill_on(None, call)
    result: tuple[Tensor, Tensor] = torch.ops.sgl_moe_jit.waterfill_topk_with_shared_expert(*call)
    return result
