# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``expand_topk_with_shared_expert`` and ``count_tokens_per_rank``, with their modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import cache_once, current_arch, load_spec
from sgl_moe_jit.ops import ep_topk
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    from_dispatcher,
    library,
    refuse_functional_gradients,
)
from sgl_moe_jit.ops.single_module import register_single

OP = "expand_topk_with_shared_expert"
COUNT_OP = "count_tokens_per_rank"


_MODULE = register_single(OP, "expand_topk")


@cache_once
def _cpu_module() -> Any:
    return load_spec(_MODULE.cpu())


@cache_once
def _cuda_module(device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(_MODULE.cuda(arch)), arch.supports_pdl


class ExpandCall(NamedTuple):
    """What a call is given, in the schema's order and with its defaults; as in the public op."""

    topk_ids: Tensor
    topk_weights: Tensor
    num_routed_experts: int
    world_size: int
    source_rank: int
    shared_weight: float = 1.0
    num_shared: int = 1
    num_token_non_padded: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """E, W, the source and S, as C++ takes them."""
        return self.num_routed_experts, self.world_size, self.source_rank, self.num_shared


def _expand(call: ExpandCall) -> tuple[Tensor, Tensor]:
    topk_ids, topk_weights, valid = call.topk_ids, call.topk_weights, call.num_token_non_padded
    ep_topk.check_shape(topk_ids, *call.shape)
    if topk_ids.device.type == "cpu":  # before anything is allocated
        _cpu_module().check(topk_ids, topk_weights, valid, *call.shape)
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    out = ep_topk.outputs(topk_ids, topk_weights, call.num_shared)
    arguments = (*out, topk_ids, topk_weights, valid, *call.shape, call.shared_weight)
    if topk_ids.device.type == "cpu":
        _cpu_module().expand_topk(*arguments, *cpu_workers())
        return out
    ep_topk.check_is_cuda(topk_ids)
    if env.CHECK_INDICES.get():
        ep_topk.check_ids(topk_ids, call.num_routed_experts, valid)
    module, pdl_supported = _cuda_module(topk_ids.device.index)
    module.expand_topk(*arguments, pdl_supported and env.PDL.get())
    return out


def _functional(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _expand(ExpandCall(*args, **kwargs))


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = ExpandCall(*args, **kwargs)
    ep_topk.check_shape(call.topk_ids, *call.shape)
    return ep_topk.outputs(call.topk_ids, call.topk_weights, call.num_shared)


library.define(
    f"{OP}(Tensor topk_ids, Tensor topk_weights, int num_routed_experts, int world_size, "
    "int source_rank, float shared_weight=1.0, int num_shared=1, "
    "Tensor? num_token_non_padded=None) -> (Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", ep_topk.weights_gradient, setup_context=ep_topk.save_sent, lib=library
)


def expand_topk_with_shared_expert(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    shared_weight: float = 1.0,
    *,
    num_shared: int = 1,
    num_token_non_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Number routed ids for dispatch, and add the shared expert of the tokens' own rank.

    W ranks hold L = E / W routed experts each, and behind them S shared slots, so that an id ``e``
    becomes ``e + (e // L) * S``, and shared slot s of rank r is ``r * (L + S) + L + s``.

    N tokens, K experts a token, E routed experts over all W ranks.

    Args:
        topk_ids: [N, K] int32 or int64, N * (K + S) below 2^31: physical experts, 0 to E - 1. A
            negative id is no expert: it is kept as it is, and its weight becomes 0.
        topk_weights: [N, K] float32, bfloat16 or float16.
        num_routed_experts: E, redundant experts included; a multiple of W.
        world_size: W, 1 to 512.
        source_rank: The rank these tokens are on, 0 to W - 1.
        shared_weight: Weight of every shared column. 1 where the routed weights already hold the
            routed scaling factor, 1 / factor where the sum is multiplied by it later. In bfloat16
            and float16 1 / factor is rounded, and comes back as 1 only nearly; in float32 within
            1e-7.
        num_shared: S, at least 1. Each shared slot holds a share of the shared expert, and the sum
            over the S columns is its output.
        num_token_non_padded: One int32 or int64 on the same device, or None. Rows from it on are
            padding: -1 in all columns, the shared ones too, and weights 0. Read on the device, so
            that it may change between replays of a CUDA graph.

    Returns:
        Ids and weights [N, K + S], dtypes of ``topk_ids`` and ``topk_weights``, new tensors, every
        item written. A row without an id at or above 0 has no shared expert: -1 and weight 0. A row
        with some has it. Copies and integers: the same on every run and device; neither
        synchronises nor reads back, so that it can be captured in a CUDA graph.

    Raises:
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes or devices disagree, or a number is out of range. An id at or above E:
            always on a CPU, on CUDA with ``SGL_MOE_JIT_CHECK_INDICES=1`` (synchronises; not in a
            capture). Without, it comes out as ``id + W * S``, past every slot there is.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``topk_weights``.

    Cost: ``N * (2K + S) * (id bytes + weight bytes)`` bytes; no flops.
    Source: include/sgl_moe_jit/moe/expand_topk.cuh, csrc/moe/expand_topk_cpu.cc. The numbering is
    sglang's (its DeepEP path, where S is 1). Reference: sgl_moe_jit.ops.reference_waterfill.expand.
    """
    ep_topk.check_kinds(
        {"topk_ids": topk_ids, "topk_weights": topk_weights},
        {"num_token_non_padded": num_token_non_padded},
        shared_weight=shared_weight,
        num_routed_experts=num_routed_experts,
        world_size=world_size,
        source_rank=source_rank,
        num_shared=num_shared,
    )
    refuse_functional_gradients(OP, topk_weights)
    call = ExpandCall(
        topk_ids,
        topk_weights,
        num_routed_experts,
        world_size,
        source_rank,
        float(shared_weight),
        num_shared,
        num_token_non_padded,
    )
    if can_bypass_dispatcher(topk_ids, topk_weights, num_token_non_padded):
        return _expand(call)
    result: tuple[Tensor, Tensor] = torch.ops.sgl_moe_jit.expand_topk_with_shared_expert(*call)
    return result


def _count(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    num_token_non_padded: Tensor | None = None,
) -> Tensor:
    counts = _fake_count(topk_ids, num_routed_experts, world_size, source_rank)
    if topk_ids.device.type == "cpu":  # before ids are copied
        shape = (num_routed_experts, world_size, source_rank, 1)
        _cpu_module().check(topk_ids, None, num_token_non_padded, *shape)
    call = (counts, topk_ids.contiguous(), num_token_non_padded, num_routed_experts, world_size)
    if topk_ids.device.type == "cpu":
        _cpu_module().count_ranks(*call, source_rank)
        return counts
    ep_topk.check_is_cuda(topk_ids)
    if env.CHECK_INDICES.get():
        ep_topk.check_ids(topk_ids, num_routed_experts, num_token_non_padded)
    module, pdl_supported = _cuda_module(topk_ids.device.index)
    module.count_ranks(*call, source_rank, pdl_supported and env.PDL.get())
    return counts


def _fake_count(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    num_token_non_padded: Tensor | None = None,
) -> Tensor:
    ep_topk.check_shape(topk_ids, num_routed_experts, world_size, source_rank, 1)
    return torch.empty((2, world_size), dtype=torch.int64, device=topk_ids.device)


library.define(
    f"{COUNT_OP}(Tensor topk_ids, int num_routed_experts, int world_size, int source_rank, "
    "Tensor? num_token_non_padded=None) -> Tensor"
)
for _key in ("CPU", "CUDA"):
    library.impl(COUNT_OP, from_dispatcher(COUNT_OP, _count), _key)
torch.library.register_fake(
    f"{NAMESPACE}::{COUNT_OP}", from_dispatcher(COUNT_OP, _fake_count), lib=library
)


def count_tokens_per_rank(
    topk_ids: Tensor,
    num_routed_experts: int,
    world_size: int,
    source_rank: int,
    *,
    num_token_non_padded: Tensor | None = None,
) -> Tensor:
    """Count how many (token, expert) pairs go to each rank, and how many tokens there are.

    The sum of this over all ranks, one all-reduce, is what
    ``waterfill_topk_with_shared_expert`` takes as ``global_counts`` and ``tokens_per_rank``.

    Args:
        topk_ids: [N, K] int32 or int64 physical experts, negative: none. An id at or above E, where
            it is no error, counts for the last rank.
        num_routed_experts: E, a multiple of W.
        world_size: W, 1 to 512.
        source_rank: The rank these tokens are on.
        num_token_non_padded: One int32 or int64 on the same device: rows from it on count nothing.

    Returns:
        [2, W] int64. Row 0: ids at or above 0 by the rank that holds the expert. Row 1: at
        ``source_rank`` the rows with at least one of them, elsewhere 0. Integer sums: the same on
        every run and device. Does not synchronise.

    Raises:
        TypeError, ValueError: as of ``expand_topk_with_shared_expert``.

    Cost: ``N * K`` ids read once.
    Source: include/sgl_moe_jit/moe/expand_topk.cuh, csrc/moe/expand_topk_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_waterfill.count.
    """
    ep_topk.check_kinds(
        {"topk_ids": topk_ids},
        {"num_token_non_padded": num_token_non_padded},
        num_routed_experts=num_routed_experts,
        world_size=world_size,
        source_rank=source_rank,
    )
    direct = can_bypass_dispatcher(topk_ids, num_token_non_padded)
    function = _count if direct else torch.ops.sgl_moe_jit.count_tokens_per_rank
    result: Tensor = function(
        topk_ids, num_routed_experts, world_size, source_rank, num_token_non_padded
    )
    return result
