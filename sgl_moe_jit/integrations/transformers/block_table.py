# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The blocks known here: by class name, and by what their stock forward computes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Style:
    """One structure of block, and what its stock forward must look like.

    Attributes:
        children: Modules that the block must have.
        names: Every name that the stock forward refers to. A version that does more (a norm, a
            factor, jitter) refers to more, and its block is then left alone.
    """

    children: tuple[str, ...]
    names: frozenset[str]


# ``shared_experts`` is added as it is (DeepSeek-V3).
PLAIN = Style(
    ("gate", "experts", "shared_experts"),
    frozenset({"shape", "view", "gate", "experts", "shared_experts"}),
)
# ``shared_expert`` is scaled by a sigmoid gate on the block's own input (Qwen2-MoE).
GATED = Style(
    ("gate", "experts", "shared_expert", "shared_expert_gate"),
    frozenset(
        {"shape", "view", "reshape", "gate", "experts", "shared_expert", "shared_expert_gate"}
        | {"F", "sigmoid"}
    ),
)
# Router, then experts, and nothing else (Qwen3-MoE).
ROUTED = Style(("gate", "experts"), frozenset({"shape", "view", "reshape", "gate", "experts"}))

# Class name -> (model folder in transformers, style). Only what is listed here is ever touched.
SUPPORTED: dict[str, tuple[str, Style]] = {
    "AXK2MoE": ("axk2", PLAIN),
    "BailingHybridMoE": ("bailing_hybrid", PLAIN),
    "DeepseekOcr2TextMoe": ("deepseek_ocr2", PLAIN),
    "DeepseekV2Moe": ("deepseek_v2", PLAIN),
    "DeepseekV3MoE": ("deepseek_v3", PLAIN),
    "DeepseekV32MoE": ("deepseek_v32", PLAIN),
    "Dots1MoE": ("dots1", PLAIN),
    "Dots3NoteTextMoE": ("dots3_note", PLAIN),
    "ExaoneMoeSparseMoEBlock": ("exaone_moe", PLAIN),
    "Glm4MoeMoE": ("glm4_moe", PLAIN),
    "Glm4MoeLiteMoE": ("glm4_moe_lite", PLAIN),
    "Glm4vMoeTextMoE": ("glm4v_moe", PLAIN),
    "Glm5NextTextMoE": ("glm5_next", PLAIN),
    "GlmMoeDsaMoE": ("glm_moe_dsa", PLAIN),
    "HYV4MoE": ("hy_v4", PLAIN),
    "HYV4VLMoE": ("hy_v4_vl", PLAIN),
    "KimiLinearMoE": ("kimi_linear", PLAIN),
    "Kolibri1SparseMoeBlock": ("kolibri1", PLAIN),
    "Mistral4MoE": ("mistral4", PLAIN),
    "MistralLarge4TextMoE": ("mistral_large4", PLAIN),
    "SolarOpenMoE": ("solar_open", PLAIN),
    "UnlimitedOcrTextMoe": ("unlimited_ocr", PLAIN),
    "Qwen2MoeSparseMoeBlock": ("qwen2_moe", GATED),
    "Qwen3NextSparseMoeBlock": ("qwen3_next", GATED),
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": ("qwen3_omni_moe", GATED),
    "Qwen3_5MoeSparseMoeBlock": ("qwen3_5_moe", GATED),
    "Qwen4ExpTextSparseMoeBlock": ("qwen4_exp", GATED),
}


# The same for blocks without shared experts, all of the style ROUTED.
ROUTED_ONLY = {
    "FlexOlmoSparseMoeBlock": "flex_olmo",
    "OlmoeSparseMoeBlock": "olmoe",
    "Qwen3MoeSparseMoeBlock": "qwen3_moe",
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": "qwen3_omni_moe",
    "Qwen3VLMoeTextSparseMoeBlock": "qwen3_vl_moe",
}


def style_of(name: str) -> Style | None:
    """Return the style of the class of that name; None where it is not listed."""
    if name in ROUTED_ONLY:
        return ROUTED
    return SUPPORTED[name][1] if name in SUPPORTED else None


def modeling_module(name: str) -> str:
    """Return the transformers module that defines the listed class of that name."""
    folder = ROUTED_ONLY[name] if name in ROUTED_ONLY else SUPPORTED[name][0]
    return f"transformers.models.{folder}.modeling_{folder}"


def _gate(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    return flat, flat[:, :2] * 0.75, flat[:, 2:] * 1.25


def _experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return hidden_states * top_k_weights.sum(-1, True) + top_k_index.sum(-1, True)


def _shared(x: Tensor) -> Tensor:
    return 3.0 * x - 0.5


def _shared_gate(x: Tensor) -> Tensor:
    return 2.0 * x[..., :1]


_STAND_INS = SimpleNamespace(
    gate=_gate,
    experts=_experts,
    shared_experts=_shared,
    shared_expert=_shared,
    shared_expert_gate=_shared_gate,
)


def forward_is_known(cls: Any, style: Style) -> bool:
    """Whether a block's stock forward computes what its style says, and does no more.

    The names it refers to must be the known ones. Names say nothing about operators and constants,
    so it is also run once, with plain functions for its children.
    """
    code = getattr(cls.forward, "__code__", None)
    if code is None or set(code.co_names) != style.names or code.co_argcount != 2:
        return False
    x = torch.arange(1, 25, dtype=torch.float64, device="cpu").sin().view(2, 3, 4)
    flat, weights, ids = _gate(x)
    expected = _experts(flat, ids, weights)
    if style is GATED:
        expected = expected + torch.sigmoid(_shared_gate(flat)) * _shared(flat)
    elif style is PLAIN:
        expected = expected + _shared(flat)
    expected = expected.view(x.shape)
    try:
        got = cls.forward(_STAND_INS, x)
        return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-12, atol=0)
    except Exception:  # of any kind: it asks its children for something else
        return False
