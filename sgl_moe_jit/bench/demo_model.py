# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a small DeepSeek-V3 of transformers, run stock and fused on the same text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.integrations.transformers import fuse_shared_experts, unfuse_shared_experts

# The vocabulary is the 256 byte values, so any text is a prompt and no tokenizer is needed.
TEXT = (
    "A mixture-of-experts layer sends every token to a few of its many experts and to one expert "
    "that all tokens share. Each chosen expert answers with a row of numbers; the layer's output "
    "is the weighted sum of those rows, plus the shared expert's row. Nothing in that sentence "
    "asks for two passes over memory, yet the sum is usually written out and read back before the "
    "last addition. C'est là que l'on gagne du temps: la somme reste dans les registres, on y "
    "ajoute la ligne partagée, puis on écrit une seule fois. 一次写入就够了。"
)
NUM_PROMPTS, PROMPT_BYTES, NEW_TOKENS = 4, 96, 32


@dataclass(frozen=True)
class SeedResult:
    """One random model in float32, stock against fused.

    Attributes:
        seed: Of the weights.
        tokens: Generated tokens compared.
        tokens_equal: How many of them agree.
        max_logit_diff: Largest difference over prompt and generation.
        logit_std: Spread of the stock logits: what the difference is small against.
        smallest_margin: Least distance between the best and the second best logit at a generated
            token: a difference of half of it could flip that token.
        dropped_shared_diff: The largest logit difference when the shared experts are left out:
            what a missing add would look like.
    """

    seed: int
    tokens: int
    tokens_equal: int
    max_logit_diff: float
    logit_std: float
    smallest_margin: float
    dropped_shared_diff: float


def prompts() -> Tensor:
    """Return the text's first bytes as token ids: [NUM_PROMPTS, PROMPT_BYTES] int64."""
    data = TEXT.encode()[: NUM_PROMPTS * PROMPT_BYTES]
    return torch.tensor(list(data)).view(NUM_PROMPTS, PROMPT_BYTES)


def build_model(seed: int, device: torch.device) -> Any:
    """Return a DeepSeek-V3 model with random float32 weights: 4 layers, 3 of them MoE.

    The initial range is 0.1 because transformers' 0.02 gives a model this narrow nearly uniform
    routing and logits.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return DeepseekV3ForCausalLM(config).eval().to(device)


def moe_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, block)`` of the blocks that own routed and shared experts."""
    for name, module in model.named_modules():
        if hasattr(module, "experts") and hasattr(module, "shared_experts"):
            yield name, module


def _logits_without_shared(model: Any, ids: Tensor) -> Tensor:
    handles = [
        block.shared_experts.register_forward_hook(lambda _m, _a, output: torch.zeros_like(output))
        for _, block in moe_layers(model)
    ]
    try:
        logits: Tensor = model(ids).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits


@torch.no_grad()
def compare_float32(model: Any, seed: int) -> SeedResult:
    """Generate greedily with the stock model and with the fused one; compare tokens and logits."""
    ids = prompts().to(model.device)
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "attention_mask": ids.new_ones(ids.shape),
    }
    stock_ids: Tensor = model.generate(ids, **options)
    stock_logits: Tensor = model(stock_ids).logits
    dropped = _logits_without_shared(model, stock_ids)
    fuse_shared_experts(model)
    try:
        our_ids: Tensor = model.generate(ids, **options)
        our_logits: Tensor = model(stock_ids).logits
    finally:
        unfuse_shared_experts(model)
    # The logits that chose the generated tokens.
    best = stock_logits[:, PROMPT_BYTES - 1 : -1].topk(2, dim=-1).values
    return SeedResult(
        seed=seed,
        tokens=NUM_PROMPTS * NEW_TOKENS,
        tokens_equal=int((stock_ids == our_ids)[:, PROMPT_BYTES:].sum()),
        max_logit_diff=float((stock_logits - our_logits).abs().max()),
        logit_std=float(stock_logits.std()),
        smallest_margin=float((best[..., 0] - best[..., 1]).min()),
        dropped_shared_diff=float((stock_logits - dropped).abs().max()),
    )
