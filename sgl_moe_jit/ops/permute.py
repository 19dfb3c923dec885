# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_permute``: each token's row copied once for every expert it goes to, grouped by expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import (
    BuildSpec,
    CudaArch,
    KernelFamily,
    cache_once,
    current_arch,
    load_spec,
    make_spec,
    register_family,
)
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.finalize import moe_finalize_fuse_shared
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    from_dispatcher,
    library,
    refuse_forward_ad,
)

OP = "moe_permute"

MAX_EXPERTS = 4096
"""Most experts one call can sort by: one warp's counters must fit in shared memory."""
_MAX_SLOTS = 2**31 - 1
_MAX_TOP_K_OF_FINALIZE = 64

# Up to here one block counts, scans and ranks: 16 warps of 8 ids a lane, all loaded at once.
_ONE_BLOCK_SLOTS = 4096
# Beyond it each warp takes a chunk, of at least _CHUNK_SLOTS; _MAX_CHUNKS bounds the scratch memory
# (8 KB an expert).
_CHUNK_SLOTS = 256
_MAX_CHUNKS = 2048


def _cuda_spec(arch: CudaArch) -> BuildSpec:
    return make_spec(
        ("permute",),
        cuda_files=["moe/permute.cu"],
        cpp_files=["moe/permute_binding.cc"],
        arch=arch,
    )


def _cpu_spec() -> BuildSpec:
    return make_spec(("permute", "cpu"), cpp_files=["moe/permute_cpu.cc"])


def _all_cuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    yield _cuda_spec(arch)


register_family(KernelFamily(OP, _all_cuda_specs, lambda: iter([_cpu_spec()])))


@cache_once
def _cpu_kernel() -> Any:
    return load_spec(_cpu_spec()).moe_permute


@cache_once
def _cuda_kernel(device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(_cuda_spec(arch)).moe_permute, arch.supports_pdl


def _check(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> None:
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
    if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"topk_ids: expected [{hidden_states.shape[0]}, top_k], got {tuple(topk_ids.shape)}"
        )
    if topk_ids.numel() > _MAX_SLOTS:
        raise ValueError(
            f"topk_ids: expected num_tokens * top_k below 2^31, got {tuple(topk_ids.shape)}; "
            "split the batch"
        )
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {num_experts}")


def _outputs(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    device = hidden_states.device
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    return (
        torch.empty((rows, hidden_states.shape[1]), dtype=hidden_states.dtype, device=device),
        torch.empty(topk_ids.shape, dtype=torch.int32, device=device),
        torch.empty((num_experts,), dtype=torch.int32, device=device),
    )


def _scratch(num_slots: int, num_experts: int, device: torch.device) -> Tensor | None:
    if num_slots <= _ONE_BLOCK_SLOTS:
        return None
    # A multiple of 8: a block's 8 chunks then fill whole 32-byte sectors of the counters.
    num_chunks = min(_MAX_CHUNKS, -(-num_slots // (8 * _CHUNK_SLOTS)) * 8)
    return torch.empty(num_experts * (num_chunks + 1), dtype=torch.int32, device=device)


def _functional(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(hidden_states, topk_ids, num_experts)
    topk_ids = topk_ids.contiguous()
    outputs = _outputs(hidden_states, topk_ids, num_experts)
    device = hidden_states.device
    if device.type == "cpu":
        _cpu_kernel()(*outputs, hidden_states, topk_ids, *cpu_workers())
        return outputs
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"hidden_states: expected a CPU or NVIDIA CUDA tensor, got device {device}"
        )
    kernel, pdl_supported = _cuda_kernel(device.index)
    kernel(
        *outputs,
        hidden_states,
        topk_ids,
        _scratch(topk_ids.numel(), num_experts, device),
        pdl_supported and env.PDL.get(),
        env.VECTOR.get(),
    )
    return outputs


def _fake(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(hidden_states, topk_ids, num_experts)
    return _outputs(hidden_states, topk_ids, num_experts)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _autograd(ctx: Any, grad: Tensor, *unused: Tensor | None) -> tuple[Any, ...]:
    (row_of,) = ctx.saved_tensors
    num_tokens, top_k = row_of.shape
    if not 1 <= top_k <= _MAX_TOP_K_OF_FINALIZE or grad.dtype not in (
        torch.bfloat16,
        torch.float32,
    ):
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(num_tokens, grad.shape[1], dtype=wide, device=grad.device)
        for k in range(top_k if grad.shape[0] else 0):
            present = (row_of[:, k] >= 0)[:, None]
            term = grad[row_of[:, k].clamp(min=0).long()].to(wide)
            total = total + term.masked_fill(~present, 0)
        return total.to(grad.dtype), None, None
    ones = torch.ones(row_of.shape, dtype=torch.float32, device=grad.device)
    total = moe_finalize_fuse_shared(grad.contiguous(), row_of, ones, None, top_k)
    return total, None, None


library.define(
    f"{OP}(Tensor hidden_states, Tensor topk_ids, SymInt num_experts) -> (Tensor, Tensor, Tensor)"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
)


def moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row once for every expert it goes to, rows grouped by expert.

    ``permuted_hidden[expanded_idx_to_permuted_idx[t, k]] = hidden_states[t]``. Rows are in expert
    order, and in slot order (``t * K + k``) within an expert.

    T tokens, K experts a token, E experts, H hidden size.

    Args:
        hidden_states: [T, H] bfloat16, float16, float32 or float64, adjacent columns, any row
            stride.
        topk_ids: [T, K] int32 or int64, T * K below 2^31. Negative, or at or above ``num_experts``:
            no expert here, and no row.
        num_experts: E, 1 to 4096.

    Returns:
        ``permuted_hidden`` [T * K, H] like ``hidden_states``; rows at and beyond
        ``expert_offsets[-1]`` are **not written** and hold whatever was there, NaN included.
        ``expanded_idx_to_permuted_idx`` [T, K] int32: each slot's row, -1 where it has none.
        ``expert_offsets`` [E] int32: the end of each expert's rows.
        Copies of bits: the same on every run and device. Neither synchronises nor reads back, so
        that it can be captured in a CUDA graph.

    Raises:
        TypeError: a dtype is not listed above.
        ValueError: shapes disagree, T * K or ``num_experts`` is out of range, columns are not
            adjacent, or devices differ.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``hidden_states``: the sum over k of the gradient's rows, in float32 or wider,
    rounded once.

    Cost: ``A * H * T * (1 + K)`` bytes and a few a slot, A the item size; no flops.
    Source: include/sgl_moe_jit/moe/permute.cuh, csrc/moe/permute_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_permute.moe_permute.
    """
    refuse_forward_ad("moe_permute", hidden_states)
    direct = can_bypass_dispatcher(hidden_states, topk_ids)
    function = _functional if direct else torch.ops.sgl_moe_jit.moe_permute
    result: tuple[Tensor, Tensor, Tensor] = function(hidden_states, topk_ids, num_experts)
    return result
