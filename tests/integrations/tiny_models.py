# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Real transformers models, tiny, with random weights that make the experts matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from sgl_moe_jit.moe.runners import base
from sgl_moe_jit.moe.runners.base import registered

VOCAB, HIDDEN, WIDTH, EXPERTS, TOP_K = 96, 64, 32, 8, 2

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # With the usual 0.02 the experts add less than a thousandth, and no test would see them.
    "initializer_range": 0.2,
}
_DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_QWEN = {"intermediate_size": 48, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS}
# Name -> (config and model class, settings, whether its blocks have shared experts to fuse).
FAMILIES = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        True,
    ),
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK, "head_dim": 16}, True),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 48}, True),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "head_dim": 16}, False),
    "mixtral": ("Mixtral", {"intermediate_size": WIDTH, "num_local_experts": EXPERTS}, False),
    "gpt_oss": (
        "GptOss",
        {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "head_dim": 16},
        False,
    ),
}
SHARED_FAMILIES = [name for name, (_, _, shared) in FAMILIES.items() if shared]
# Those whose blocks fuse_shared_experts takes.
FUSED_FAMILIES = [*SHARED_FAMILIES, "qwen3_moe"]
_MORE_FAMILIES = {
    # softmax, groups by their best expert, no bias
    "deepseek_v2": (
        "DeepseekV2",
        {**FAMILIES["deepseek_v3"][1], "topk_method": "group_limited_greedy"},
        True,
    ),
    # Kimi-K2 has DeepSeek-V3's class: one group, another factor
    "kimi_k2": (
        "DeepseekV3",
        {**FAMILIES["deepseek_v3"][1], "n_group": 1, "routed_scaling_factor": 2.827},
        True,
    ),
}
ALL_FUSED_FAMILIES = [*FUSED_FAMILIES, *_MORE_FAMILIES]


def settings_of(family: str):
    """Name of config and model class, and the config's settings."""
    name, settings, _ = {**FAMILIES, **_MORE_FAMILIES}[family]
    return name, {**_COMMON, **settings}


def build(family: str, seed: int = 0, implementation: str = "eager"):
    """A float32 model on the CPU, in eval mode."""
    name, settings = settings_of(family)
    config = getattr(transformers, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in key:  # zero at start, which would hide a bias that is never added
                tensor.normal_(0, 0.2)
    model.set_experts_implementation(implementation)
    return model


def tokens(seed: int = 0, batch: int = 2, length: int = 7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (batch, length), generator=generator)


def moe_blocks(model):
    """Every module that holds experts, by name."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "experts")}


def let_runners_overwrite(monkeypatch, *, says=True):
    """Let runners overwrite their input, and say so or not, whoever makes them; returns inputs."""
    inputs = []

    class Overwriting:
        mutates_input = says

        def __init__(self, inner):
            self.inner, self.name, self.can_defer = inner, inner.name, inner.can_defer

        def run(self, hidden_states, topk_output, *, defer):
            output = self.inner.run(hidden_states, topk_output, defer=defer)
            inputs.append(hidden_states.fill_(float("nan")))
            return output

    entry = registered("grouped_mm")
    mine = replace(entry, bind=lambda w, config: Overwriting(entry.bound(w, config)))
    monkeypatch.setitem(base._registry, "grouped_mm", mine)
    return inputs


def last_block(family):
    return list(moe_blocks(build(family)).values())[-1]


def assert_close(got, expected, roundings: int, what: str):
    """Two float32 evaluations of one expression, each of so many roundings an element.

    Each rounding is at most 2**-24 of the terms around it; those are taken to be no larger than the
    largest element expected. Twice, because both evaluations round.
    """
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if got.numel() == 0:
        return
    allowed = 2 * roundings * 2.0**-24 * expected.abs().max().item()
    error = (got.double() - expected.double()).abs()
    worst = int(error.argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: {int((~(error <= allowed)).sum())} of {error.numel()} differ by more than "
        f"{allowed:.3g}; flat element {worst}: got {got.flatten()[worst]}, expected "
        f"{expected.flatten()[worst]}; NaN: {int(got.isnan().sum())}"
    )


# An element of a block's output passes two GEMMs, the weighted sum, the shared expert and its add.
BLOCK_ROUNDINGS = HIDDEN + WIDTH + TOP_K + 4
# Two layers; what attention, norms and head round is the same code in both.
LOGIT_ROUNDINGS = 2 * BLOCK_ROUNDINGS


def recorded_router_logits(model, ids):
    """Return the router logits of each layer; skips where this transformers records none."""
    logits = getattr(model(ids, output_router_logits=True), "router_logits", None)
    if logits is None:
        pytest.skip(f"{type(model).__name__} of this transformers records no router logits")
    return logits
