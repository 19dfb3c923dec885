# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Few tokens through all experts: two batched GEMMs that read each weight once, at full speed.

With few tokens a GPU spends its time reading weights. Once the tokens' choices together hit most
experts, multiplying every token with every expert reads hardly more, needs no permutation, and runs
on cuBLAS's batched GEMM, which reads faster than torch's grouped one. DeepSeek-V3's 32 experts of
one rank on an H200 (2026-11-30, CUDA graphs, us for both GEMMs, grouped / batched): 4 tokens 620 /
682, 8 tokens 943 / 686, 64 tokens 964 / 743, 128 tokens 927 / 732.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.moe.autocast import autocast_off
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops.activation import silu_and_mul

# Of the weights, as many as grouped GEMMs read of all in the time that batched ones read all.
LEAST_SHARE = 0.72


def expected_share(num_tokens: int, top_k: int, num_experts: int) -> float:
    """Return which share of the experts some token is expected to choose, if all are as likely."""
    return 1.0 - max(0.0, 1.0 - top_k / num_experts) ** num_tokens


def _needs_grad(weights: ExpertWeights, hidden_states: Tensor) -> bool:
    norm = weights.post_expert_norm
    tensors = (hidden_states, weights.up, weights.down, weights.up_bias, weights.down_bias)
    return torch.is_grad_enabled() and (
        any(x is not None and x.requires_grad for x in tensors)
        or (isinstance(norm, torch.nn.Module) and any(p.requires_grad for p in norm.parameters()))
    )


def serves(weights: ExpertWeights, hidden_states: Tensor, choice: StandardTopKOutput) -> bool:
    """Whether a call is better served in this way.

    Not where the ids are of unknown density (``choice.num_experts`` is None), as behind a
    dispatcher; with gradients; in traced code, where the number of tokens may be anything; and not
    on a CPU, which multiplies no faster than it reads.
    """
    num_tokens, most = hidden_states.shape[0], env.ALL_EXPERTS_MAX_TOKENS.get()
    if not hidden_states.is_cuda or choice.num_experts is None or torch.compiler.is_compiling():
        return False
    if not 0 < num_tokens <= most:
        return False
    top_k = choice.topk_ids.shape[1]
    return expected_share(num_tokens, top_k, choice.num_experts) >= LEAST_SHARE and not _needs_grad(
        weights, hidden_states
    )


def rows_of_slots(ids: Tensor, num_experts: int, num_tokens: int) -> Tensor:
    """Return [T, K] int32: where a slot's row is among E blocks of T rows; negative without one."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=ids.device)
    bounded = ids.clamp(-1, num_experts).to(torch.int32)
    rows = torch.add(token[:, None], bounded, alpha=num_tokens)
    return rows.masked_fill_(rows >= num_experts * num_tokens, -1)


def expert_rows(
    weights: ExpertWeights, hidden_states: Tensor, ids: Tensor, *, fused_activation: bool
) -> tuple[Tensor, Tensor]:
    """Return every expert's output of every token [E * T, H], and each slot's row among them.

    Rows that no slot refers to are computed and never read, whatever they hold.
    """
    num_experts, num_tokens = weights.num_experts, hidden_states.shape[0]
    dtype = hidden_states.dtype

    def multiply(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        with autocast_off(x.device.type):  # a batched GEMM is on its list, a grouped one is not
            out = torch.bmm(x, matrix)
        if bias is not None:
            out = out + bias[:, None].to(dtype)
        return out.view(num_experts * num_tokens, -1)

    x = hidden_states.expand(num_experts, -1, -1)
    hidden = multiply(x, weights.up_as_input_major(), weights.up_bias)
    hidden = silu_and_mul(hidden) if fused_activation else weights.activate(hidden).to(dtype)
    hidden = hidden.view(num_experts, num_tokens, -1)
    rows = multiply(hidden, weights.down_as_input_major(), weights.down_bias)
    if weights.post_expert_norm is not None:
        rows = weights.post_expert_norm(rows).to(dtype)
    return rows, rows_of_slots(ids, num_experts, num_tokens)
