# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The finalize of named public models, and inputs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A pool's rows repeat after so many: a CPU draws them for longer than the measurement takes.
_DRAWN_ROWS = 4096
_ALIGNED_ITEMS = 128  # 256 bytes of the narrowest weights


@dataclass(frozen=True)
class FinalizeCase:
    """Sizes of one model's finalize.

    Attributes:
        name: As in result files.
        hidden_dim: H.
        padded_hidden_dim: H_pad, the width of ``gemm2_out``.
        top_k: K.
        num_experts: E, routed.
    """

    name: str
    hidden_dim: int
    padded_hidden_dim: int
    top_k: int
    num_experts: int


CASES = {
    case.name: case
    for case in (
        FinalizeCase("deepseek-v3", 7168, 7168, 8, 256),
        FinalizeCase("kimi-k2", 7168, 7168, 8, 384),
        FinalizeCase("kimi-k3", 3584, 3584, 16, 896),
        FinalizeCase("glm-4.5", 5120, 5120, 8, 160),
        FinalizeCase("qwen3-235b", 4096, 4096, 8, 128),
        FinalizeCase("qwen3-30b", 2048, 2048, 8, 128),
        FinalizeCase("qwen3-next", 2048, 2048, 10, 512),
        FinalizeCase("gpt-oss-120b", 2880, 3072, 4, 128),
        FinalizeCase("deepseek-v2", 5120, 5120, 6, 160),
        FinalizeCase("llama4", 5120, 5120, 1, 128),
    )
}


def cases_named(names: Sequence[str]) -> list[FinalizeCase]:
    """Return the cases of these names; ``all`` stands for every one.

    Raises:
        ValueError: there is no such case.
    """
    for name in names:
        if name not in (*CASES, "all"):
            raise ValueError(f"--cases: expected all or some of {', '.join(CASES)}, got {name!r}")
    wanted = list(CASES) if "all" in names else names
    return [CASES[name] for name in wanted]


@dataclass(frozen=True)
class FinalizeInputs:
    """One finalize call's tensors; views into pools when several are made together.

    Attributes:
        gemm2_out: [P, H_pad], the pool of all calls.
        expanded_idx_to_permuted_idx: [T, K] int32.
        expert_weights: [T, K].
        shared_output: [T, H].
        out: [T, H].
        first_row: Where T * K rows of the pool begin that no other call's ``first_row`` covers, for
            whoever reads without an index.
    """

    gemm2_out: Tensor
    expanded_idx_to_permuted_idx: Tensor
    expert_weights: Tensor
    shared_output: Tensor
    out: Tensor
    first_row: int


def make_finalize_inputs(
    case: FinalizeCase,
    num_tokens: int,
    copies: int,
    *,
    device: torch.device | str,
    activation: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[FinalizeInputs]:
    """Return ``copies`` calls that share only ``gemm2_out``, a pool where each has its own rows.

    Rows are a random permutation of the pool, as after an expert-major GEMM. Indices and weights
    start on multiples of 256 bytes, as tensors of their own would.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    slots = num_tokens * case.top_k
    pool = torch.empty(copies * slots, case.padded_hidden_dim, dtype=activation, device=device)
    drawn = min(copies * slots, _DRAWN_ROWS)
    pool[:drawn].normal_(generator=generator)
    for first in range(drawn, copies * slots, drawn):
        pool[first : first + drawn] = pool[: min(drawn, copies * slots - first)]

    def per_copy(values: Tensor) -> Tensor:
        """Return [copies * T * K] as [copies, T, K] with the copies apart."""
        apart = -(-slots // _ALIGNED_ITEMS) * _ALIGNED_ITEMS
        padded = values.new_empty(copies, apart)
        padded[:, :slots] = values.view(copies, slots)
        return padded[:, :slots].view(copies, num_tokens, case.top_k)

    order = torch.randperm(copies * slots, generator=generator, device=device)
    rows = per_copy(order.int())
    draw = torch.rand(copies * slots, generator=generator, device=device, dtype=torch.float32)
    weights = per_copy(draw.to(weight))
    shared = torch.empty(copies, num_tokens, case.hidden_dim, dtype=activation, device=device)
    shared.normal_(generator=generator)
    out = torch.empty_like(shared)
    return [
        FinalizeInputs(pool, rows[i], weights[i], shared[i], out[i], i * slots)
        for i in range(copies)
    ]
