# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind ``waterfill_topk_with_shared_expert``, and which path serves a call."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import cache_once, current_arch, load_spec
from sgl_moe_jit.ops import ep_topk
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.single_module import register_single

OP = "waterfill_topk_with_shared_expert"

MODES = {"exact": 0, "exact_restricted": 1, "sampled": 2}
"""As numbered by WaterfillMode in ``include/sgl_moe_jit/moe/waterfill_params.h``."""


class WaterfillPath(enum.IntEnum):
    """Kernels that one call launches; both give the same bits."""

    ONE_LAUNCH = 1
    """One block counts, plans and writes: a decode batch."""
    THREE_LAUNCHES = 3
    """Count over many blocks, plan, write over many blocks."""


_CHUNK_ROWS = 256
# What one block is given; in waterfill_params.h what it can take. In one launch and in three, top 8
# over 32 ranks on an H200 (2026-11-30, benchmarks/results/waterfill.json): 5.5 and 8.3 us for 512
# rows; 1024 take 8.3 in three, and took 10.1 in one in a run before.
_ONE_BLOCK_ROWS = {"exact": 768, "exact_restricted": _CHUNK_ROWS, "sampled": 768}
_ONE_BLOCK_IDS = 8192
# int64 items of a WaterfillPlan.
_PLAN_ITEMS = 6 + 2 * ep_topk.MAX_RANKS + 1


_MODULE = register_single(OP, "waterfill")


@cache_once
def _cpu_module() -> Any:
    return load_spec(_MODULE.cpu())


@cache_once
def _cuda_kernel(device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(_MODULE.cuda(arch)).waterfill_topk, arch.supports_pdl


def can_take_one_launch(num_tokens: int, top_k: int, mode: str) -> bool:
    """Whether one block has room for a call of this size."""
    return num_tokens <= _ONE_BLOCK_ROWS[mode] and num_tokens * top_k <= _ONE_BLOCK_IDS


class WaterfillCall(NamedTuple):
    """What a call is given, in the schema's order and with its defaults; as in the public op."""

    topk_ids: Tensor
    topk_weights: Tensor
    num_routed_experts: int
    world_size: int
    source_rank: int
    shared_weight: float = 1.0
    mode: str = "exact"
    global_counts: Tensor | None = None
    tokens_per_rank: Tensor | None = None
    remainder_start: int = 0
    num_token_non_padded: Tensor | None = None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """E, W and the source, as C++ takes them."""
        return self.num_routed_experts, self.world_size, self.source_rank

    @property
    def choice(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """What decides about the ranks, as C++ takes it."""
        return self.global_counts, self.tokens_per_rank, MODES[self.mode], self.remainder_start


def check_inputs(call: WaterfillCall) -> None:
    """Refuse wrong inputs before anything is allocated; on CUDA the launch has the rest of it."""
    if call.topk_ids.device.type == "cpu":
        tensors = (call.topk_ids, call.topk_weights, call.num_token_non_padded)
        _cpu_module().check(*tensors, *call.numbers, *call.choice)


def launch(
    outputs: tuple[Tensor, Tensor], call: WaterfillCall, *, path: WaterfillPath | None = None
) -> None:
    """Write ``outputs``, ids and weights [N, K + 1].

    Args:
        outputs: Allocated.
        call: Its numbers are checked, its ids and weights contiguous; the rest is checked in C++.
        path: On CUDA, the path to take: for tests and benchmarks. Chosen by size when None.

    Raises:
        ValueError: the path cannot serve a call of this size.
    """
    topk_ids, mode, valid = call.topk_ids, call.mode, call.num_token_non_padded
    num_tokens, top_k = topk_ids.shape
    tensors = (*outputs, topk_ids, call.topk_weights, valid)
    arguments = (*tensors, *call.numbers, call.shared_weight, *call.choice)
    if topk_ids.device.type == "cpu":
        _cpu_module().waterfill_topk(*arguments, *cpu_workers())
        return
    ep_topk.check_is_cuda(topk_ids)
    if env.CHECK_INDICES.get():
        ep_topk.check_ids(topk_ids, call.num_routed_experts, valid)
    one = can_take_one_launch(num_tokens, top_k, mode)
    if path is WaterfillPath.ONE_LAUNCH and not one:
        raise ValueError(
            f"path: one launch takes {_ONE_BLOCK_ROWS[mode]} rows and {_ONE_BLOCK_IDS} ids, got "
            f"{num_tokens} and {num_tokens * top_k}"
        )
    scratch = None
    if path is WaterfillPath.THREE_LAUNCHES or not one:
        chunks = -(-num_tokens // _CHUNK_ROWS)
        items = 2 * _PLAN_ITEMS + chunks * (call.world_size + 1)  # of the plan two words each
        scratch = torch.empty(items, dtype=torch.int32, device=topk_ids.device)
    kernel, pdl_supported = _cuda_kernel(topk_ids.device.index)
    kernel(*arguments, scratch, pdl_supported and env.PDL.get())
