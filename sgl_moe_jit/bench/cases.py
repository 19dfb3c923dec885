# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The finalize of named public models, and inputs for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FinalizeCase:
    """Sizes of one model's finalize.

    Attributes:
        name: As in result files.
        hidden_dim: H.
        padded_hidden_dim: H_pad, the width of ``gemm2_out``.
        top_k: K.
    """

    name: str
    hidden_dim: int
    padded_hidden_dim: int
    top_k: int


CASES = {
    case.name: case
    for case in (
        FinalizeCase("deepseek-v3", 7168, 7168, 8),
        FinalizeCase("kimi-k2", 7168, 7168, 8),
        FinalizeCase("kimi-k3", 3584, 3584, 16),
        FinalizeCase("glm-4.5", 5120, 5120, 8),
        FinalizeCase("qwen3-235b", 4096, 4096, 8),
        FinalizeCase("qwen3-30b", 2048, 2048, 8),
        FinalizeCase("qwen3-next", 2048, 2048, 10),
        FinalizeCase("gpt-oss-120b", 2880, 3072, 4),
        FinalizeCase("deepseek-v2", 5120, 5120, 6),
        FinalizeCase("llama4", 5120, 5120, 1),
    )
}


@dataclass(frozen=True)
class FinalizeInputs:
    """One finalize call's tensors; views into pools when several are made together."""

    gemm2_out: Tensor
    expanded_idx_to_permuted_idx: Tensor
    expert_weights: Tensor
    shared_output: Tensor
    out: Tensor


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

    Rows are a random permutation of the pool, as after an expert-major GEMM.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    slots = copies * num_tokens * case.top_k
    pool = torch.empty(slots, case.padded_hidden_dim, dtype=activation, device=device)
    pool.normal_(generator=generator)
    rows = torch.randperm(slots, generator=generator, device=device).int()
    rows = rows.view(copies, num_tokens, case.top_k)
    weights = torch.rand(
        copies, num_tokens, case.top_k, generator=generator, device=device, dtype=torch.float32
    ).to(weight)
    shared = torch.empty(copies, num_tokens, case.hidden_dim, dtype=activation, device=device)
    shared.normal_(generator=generator)
    out = torch.empty_like(shared)
    return [FinalizeInputs(pool, rows[i], weights[i], shared[i], out[i]) for i in range(copies)]
