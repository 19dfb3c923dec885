# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The modules behind ``moe_permute``: which exist, and which path serves a call."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import cache_once, current_arch, load_spec
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.single_module import register_single

OP = "moe_permute"


class PermutePath(enum.IntEnum):
    """Kernels that one call launches; every path gives the same bits.

    Numbered as in ``include/sgl_moe_jit/moe/permute_params.h``.
    """

    ONE_LAUNCH = 1
    """Every block ranks its own slots among all ids: no second kernel, work grows with N^2."""
    TWO_LAUNCHES = 2
    """One block ranks all slots, then a gather: work grows with N, on one multiprocessor."""
    FOUR_LAUNCHES = 4
    """Count, scan, rank over many blocks, then a gather."""


# Most slots for which each path is taken. One launch was quickest at every size that it has room
# for: 2.6 against 6.0 us at 256 slots, 11.1 against 13.7 at 2048, 23.5 against 25.1 at 4096 (hidden
# 7168, 256 experts, H200, 2026-11-30, benchmarks/results/permute.json). So two launches serve only
# more experts or a larger top_k than it takes.
_ONE_LAUNCH_SLOTS = 4096
_TWO_LAUNCHES_SLOTS = 4096
# What else one launch has room for: kOneLaunchMax* in permute_params.h.
_ONE_LAUNCH_EXPERTS = 1024
_ONE_LAUNCH_TOP_K = 64

# On four launches each warp takes a chunk, of at least _CHUNK_SLOTS; _MAX_CHUNKS bounds the scratch
# memory (8 KB an expert).
_CHUNK_SLOTS = 256
_MAX_CHUNKS = 2048


_MODULE = register_single(OP, "permute")


@cache_once
def _cpu_kernels() -> tuple[Any, Any]:
    """Return the exports that check the inputs, and that write the outputs."""
    module = load_spec(_MODULE.cpu())
    return module.check, module.moe_permute


@cache_once
def _cuda_kernel(device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(_MODULE.cuda(arch)).moe_permute, arch.supports_pdl


def choose_path(num_slots: int, num_experts: int, top_k: int) -> PermutePath:
    """Return the path that serves a call on CUDA."""
    fits = num_experts <= _ONE_LAUNCH_EXPERTS and top_k <= _ONE_LAUNCH_TOP_K
    if num_slots <= _ONE_LAUNCH_SLOTS and fits:
        return PermutePath.ONE_LAUNCH
    return (
        PermutePath.TWO_LAUNCHES if num_slots <= _TWO_LAUNCHES_SLOTS else PermutePath.FOUR_LAUNCHES
    )


def _scratch(
    path: PermutePath, num_slots: int, num_experts: int, alignment: int, device: torch.device
) -> Tensor | None:
    """Return counters [E, chunks] and behind them each expert's count [E], where a path needs them.

    The counts tell the gather where an expert's padding begins.
    """
    if path is PermutePath.ONE_LAUNCH or (path is PermutePath.TWO_LAUNCHES and alignment == 1):
        return None
    num_chunks = 0
    if path is PermutePath.FOUR_LAUNCHES:
        # A multiple of 8: a block's 8 chunks then fill whole 32-byte sectors of the counters.
        num_chunks = min(_MAX_CHUNKS, max(1, -(-num_slots // (8 * _CHUNK_SLOTS))) * 8)
    return torch.empty(num_experts * (num_chunks + 1), dtype=torch.int32, device=device)


def check_inputs(hidden_states: Tensor, topk_ids: Tensor) -> None:
    """Refuse wrong inputs before there are outputs; on CUDA the launch has the rest of it.

    Args:
        hidden_states: As of the public op.
        topk_ids: Likewise, of any strides.
    """
    device = hidden_states.device
    if device.type == "cpu":
        _cpu_kernels()[0](hidden_states, topk_ids)
    elif device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"hidden_states: expected a CPU or NVIDIA CUDA tensor, got device {device}"
        )


def launch(
    outputs: tuple[Tensor, Tensor, Tensor],
    hidden_states: Tensor,
    topk_ids: Tensor,
    alignment: int,
    *,
    path: PermutePath | None = None,
) -> None:
    """Write ``outputs``: permuted rows, each slot's row and each expert's end.

    Args:
        outputs: As :func:`sgl_moe_jit.ops.moe_permute` returns them, allocated.
        hidden_states: [T, H]; it and the ids have passed :func:`check_inputs`.
        topk_ids: [T, K], contiguous.
        alignment: 1 to 1024.
        path: On CUDA, the path to take: for tests and benchmarks. Chosen by size when None.
    """
    device = hidden_states.device
    if device.type == "cpu":
        _cpu_kernels()[1](*outputs, hidden_states, topk_ids, alignment, *cpu_workers())
        return
    kernel, pdl_supported = _cuda_kernel(device.index)
    num_slots, num_experts = topk_ids.numel(), outputs[2].numel()
    if path is None:
        path = choose_path(num_slots, num_experts, topk_ids.shape[1])
    kernel(
        *outputs,
        hidden_states,
        topk_ids,
        _scratch(path, num_slots, num_experts, alignment, device),
        alignment,
        path,
        pdl_supported and env.PDL.get(),
        env.VECTOR.get(),
    )
