# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""MoEConfig.from_hf over the configurations of real models: every column of a table of them."""

import json
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from sgl_moe_jit.moe.config import MoEConfig

CONFIGS = json.loads((Path(__file__).parent / "hf_configs" / "configs.json").read_text())


class Row(NamedTuple):
    """Sizes; shared: (count, width, gated); score; bias; norm; factor; groups; bf16 GiB; and what
    else is not as in most models."""

    hidden: int
    width: int
    experts: int
    top_k: int
    shared: tuple | None
    score: str
    bias: bool
    norm: bool
    factor: float
    groups: tuple = (1, 1)
    gib: float = 0.0
    logits: str = "float32"
    weights: str = "float32"
    extra: dict = {}  # noqa: RUF012


MODEL = {"logits": "model"}
CAST = {"logits": "model", "weights": "logits"}
V3 = {"score": "sigmoid", "bias": True, "norm": True}
V2 = {"score": "softmax", "bias": False, "norm": False}
NO_NORM = {"score": "softmax", "bias": False, "norm": False, "factor": 1.0}
NORM = {**NO_NORM, "norm": True}
DUE = {"scale_in_weights": False}
AFTER = {"score_after_top_k": True}
INPUT = {"weight_on_input": True, **AFTER}
TABLE = {
    "deepseek-v2-lite": Row(2048, 1408, 64, 6, (2, 2816, False), **V2, factor=1.0, gib=1.0),
    "deepseek-v2": Row(
        5120, 1536, 160, 6, (2, 3072, False), **V2, factor=16.0, groups=(8, 3), gib=7.0,
        extra={"group_rule": "max"},
    ),
    "deepseek-v3": Row(
        7168, 2048, 256, 8, (1, 2048, False), **V3, factor=2.5, groups=(8, 4), gib=21.0
    ),
    "deepseek-v3.2": Row(
        7168, 2048, 256, 8, (1, 2048, False), **V3, factor=2.5, groups=(8, 4), gib=21.0
    ),
    "deepseek-v4-flash": Row(
        4096, 2048, 256, 6, (1, 2048, False), "sqrtsoftplus", True, True, 1.5, gib=12.0, **CAST
    ),
    "deepseek-v4-pro": Row(
        7168, 3072, 384, 6, (1, 3072, False), "sqrtsoftplus", True, True, 2.5, gib=47.3, **CAST
    ),
    "kimi-k2": Row(7168, 2048, 384, 8, (1, 2048, False), **V3, factor=2.827, gib=31.5),
    "kimi-k2.5": Row(7168, 2048, 384, 8, (1, 2048, False), **V3, factor=2.827, gib=31.5),
    "kimi-k3": Row(7168, 3072, 896, 16, (2, 6144, False), **V3, factor=1.0, gib=55.1),
    "glm-4.7": Row(5120, 1536, 160, 8, (1, 1536, False), **V3, factor=2.5, gib=7.0),
    "glm-4.5-air": Row(4096, 1408, 128, 8, (1, 1408, False), **V3, factor=1.0, gib=4.1),
    "glm-4.7-flash": Row(2048, 1536, 64, 4, (1, 1536, False), **V3, factor=1.8, gib=1.1),
    "glm-5": Row(6144, 2048, 256, 8, (1, 2048, False), **V3, factor=2.5, gib=18.0),
    "glm-5.2": Row(6144, 2048, 256, 8, (1, 2048, False), **V3, factor=2.5, gib=18.0),
    "qwen1.5-moe-a2.7b": Row(2048, 1408, 60, 4, (1, 5632, True), **NO_NORM, gib=1.0, **CAST),
    "qwen2-57b-a14b": Row(3584, 2560, 64, 8, (1, 20480, True), **NO_NORM, gib=3.3, **CAST),
    "qwen3-30b-a3b": Row(2048, 768, 128, 8, None, **NORM, gib=1.1, **CAST),
    "qwen3-235b-a22b": Row(4096, 1536, 128, 8, None, **NORM, gib=4.5, **CAST),
    "qwen3-coder-480b-a35b": Row(6144, 2560, 160, 8, None, **NORM, gib=14.1, **CAST),
    "qwen3-next-80b-a3b": Row(2048, 512, 512, 10, (1, 512, True), **NORM, gib=3.0, **CAST),
    "qwen3.5-35b-a3b": Row(2048, 512, 256, 8, (1, 512, True), **NORM, gib=1.5, **CAST),
    "qwen3.5-122b-a10b": Row(3072, 1024, 256, 8, (1, 1024, True), **NORM, gib=4.5, **CAST),
    "qwen3.5-397b-a17b": Row(4096, 1024, 512, 10, (1, 1024, True), **NORM, gib=12.0, **CAST),
    "gpt-oss-20b": Row(2880, 2880, 32, 4, None, **NO_NORM, gib=1.5, **CAST, extra=AFTER),
    "gpt-oss-120b": Row(2880, 2880, 128, 4, None, **NO_NORM, gib=5.9, **CAST, extra=AFTER),
    "llama-4-scout": Row(
        5120, 8192, 16, 1, (1, 8192, False), "sigmoid", False, False, 1.0, gib=3.8, **CAST,
        extra=INPUT,
    ),
    "llama-4-maverick": Row(
        5120, 8192, 128, 1, (1, 8192, False), "sigmoid", False, False, 1.0, gib=30.0, **CAST,
        extra=INPUT,
    ),
    "minimax-m2.5": Row(3072, 1536, 256, 8, None, **V3, factor=1.0, gib=6.8, **MODEL),
    "minimax-m3": Row(
        6144, 3072, 128, 4, (1, 3072, False), **V3, factor=2.0, gib=13.5, **MODEL, extra=DUE
    ),
    "mimo-v2-flash": Row(4096, 2048, 256, 8, None, **V3, factor=1.0, gib=12.0),
    "step-3.7-flash": Row(
        4096, 1280, 288, 8, (1, 1280, False), **V3, factor=3.0, gib=8.4, extra=DUE
    ),
    "mixtral-8x7b": Row(4096, 14336, 8, 2, None, **NORM, gib=2.6, **MODEL),
    "mixtral-8x22b": Row(6144, 16384, 8, 2, None, **NORM, gib=4.5, **MODEL),
    "olmoe-1b-7b": Row(2048, 1024, 64, 8, None, **NO_NORM, gib=0.8, **CAST),
    "hunyuan-a13b": Row(4096, 3072, 64, 8, (1, 3072, False), **NORM, gib=4.5, **CAST),
    "hy3-preview": Row(4096, 1536, 192, 8, (1, 1536, False), **V3, factor=2.826, gib=6.8),
    "ernie-4.5-21b-a3b": Row(
        2560, 1536, 64, 6, (2, 3072, False), "softmax", True, True, 1.0, gib=1.4, weights="hidden"
    ),
    "ernie-4.5-300b-a47b": Row(
        8192, 3584, 64, 8, None, "softmax", True, True, 1.0, gib=10.5, weights="hidden"
    ),
    "longcat-flash": Row(6144, 2048, 512, 12, None, "softmax", True, False, 6.0, gib=36.0),
    "dbrx": Row(6144, 10752, 16, 4, None, **NORM, gib=5.9, **CAST),
    "nemotron-3-nano-30b": Row(2688, 1856, 128, 6, (1, 3712, False), **V3, factor=2.5, gib=2.4),
    "nemotron-3-super-120b": Row(
        4096, 2688, 512, 22, (1, 5376, False), **V3, factor=5.0, gib=5.3
    ),
    "nemotron-3-ultra-550b": Row(
        8192, 5120, 512, 22, (1, 10240, False), **V3, factor=5.0, gib=20.0
    ),
    "gemma-4-26b-a4b": Row(
        2816, 704, 128, 8, None, **NORM, gib=1.4, **MODEL, extra={"has_expert_scale": True}
    ),
    "ling-3.0-flash": Row(
        2560, 768, 512, 8, (1, 768, False), **V3, factor=2.5, groups=(8, 4), gib=5.6
    ),
}  # fmt: skip
# What is particular to few models.
LATENT = {"kimi-k3": 3584, "nemotron-3-super-120b": 1024, "nemotron-3-ultra-550b": 2048}
DENSE_BRANCH = {"longcat-flash": 12288, "gemma-4-26b-a4b": 2112}
EPSILON = {
    **{n: (1e-20, "add") for n, row in TABLE.items() if row.bias and row.score != "softmax"},
    **dict.fromkeys(("minimax-m2.5", "minimax-m3", "step-3.7-flash"), (0.0, "add")),
    **dict.fromkeys(("ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b"), (1e-12, "clamp")),
}
ACTIVATION = {  # kind, gated, limit, clamp, alpha, beta, linear_beta
    **dict.fromkeys(
        ("deepseek-v4-flash", "deepseek-v4-pro"), ("silu", True, 10.0, "before", None, None, None)
    ),
    **dict.fromkeys(
        ("gpt-oss-20b", "gpt-oss-120b", "minimax-m3"),
        ("swiglu_oai", True, 7.0, "before", 1.702, None, None),
    ),
    **dict.fromkeys(
        ("nemotron-3-nano-30b", "nemotron-3-super-120b", "nemotron-3-ultra-550b"),
        ("relu2", False, None, None, None, None, None),
    ),
    "kimi-k3": ("situ", True, None, None, None, 4.0, 25.0),
    "gemma-4-26b-a4b": ("gelu_tanh", True, None, None, None, None, None),
}
PLAIN = ("silu", True, None, None, None, None, None)
LAYERS = {  # first MoE layer, how many
    "deepseek-v3": (3, 58),
    "glm-4.7": (3, 89),
    "llama-4-scout": (0, 48),
    "llama-4-maverick": (1, 24),
    "minimax-m3": (3, 57),
    "mimo-v2-flash": (1, 47),
    "step-3.7-flash": (3, 42),
    "ernie-4.5-21b-a3b": (1, 27),
    "nemotron-3-nano-30b": (1, 23),
    "qwen3-30b-a3b": (0, 48),
    "ling-3.0-flash": (2, 40),
}
NEEDS_LAYER = {"step-3.7-flash", "hunyuan-a13b"}


def read(name):
    return MoEConfig.from_hf(CONFIGS[name], 5 if name in NEEDS_LAYER else None)


def activation_of(config):
    return tuple(getattr(config, field.name) for field in fields(config))


def test_the_table_has_every_model():
    assert set(TABLE) == set(CONFIGS)


@pytest.mark.parametrize("name", TABLE)
def test_every_column(name):
    row, moe = TABLE[name], read(name)
    router, shared = moe.router, moe.shared_experts
    num_zero = 256 if name == "longcat-flash" else 0
    assert (moe.hidden_dim, moe.intermediate_dim) == (row.hidden, row.width)
    assert (moe.num_experts, moe.num_zero_experts) == (row.experts, num_zero)
    assert moe.top_k == router.top_k == row.top_k
    assert router.num_experts == row.experts + num_zero
    assert moe.expert_hidden_dim == LATENT.get(name, row.hidden)
    assert moe.dense_branch_dim == DENSE_BRANCH.get(name)
    assert moe.has_latent_norm == (name == "kimi-k3")
    found = shared and (shared.count, shared.intermediate_dim, shared.is_gated)
    assert found == row.shared
    assert (router.score_function, router.has_correction_bias) == (row.score, row.bias)
    assert (router.renormalize, router.routed_scaling_factor) == (row.norm, row.factor)
    assert (router.n_group, router.topk_group) == row.groups
    assert (router.logits_dtype, router.weights_dtype) == (row.logits, row.weights)
    epsilon = (router.renormalize_epsilon, router.epsilon_kind)
    assert epsilon == EPSILON.get(name, (0.0, "add"))
    usual = {
        "scale_in_weights": True,
        "score_after_top_k": False,
        "weight_on_input": False,
        "has_expert_scale": False,
        "group_rule": "top2_sum",
        **({"group_rule": "max"} if moe.model_type == "deepseek_v2" else {}),
    }
    assert {k: getattr(router, k) for k in usual} == {**usual, **row.extra}
    assert moe.routed_weight_bytes() / 2**30 == pytest.approx(row.gib, abs=0.0501)
    assert activation_of(moe.activation) == ACTIVATION.get(name, PLAIN)
    if shared:
        assert shared.activation == moe.activation
    assert moe.hash_layers == ((0, 1, 2) if name.startswith("deepseek-v4") else ())
    if name in LAYERS:
        assert (moe.moe_layers[0], len(moe.moe_layers)) == LAYERS[name]


# transformers renames keys, fills in defaults and turns null into 1.0: the layer is the same.
@pytest.mark.parametrize("name", sorted(set(TABLE) - {"kimi-k3"}))
def test_a_transformers_config_says_the_same(name):
    transformers = pytest.importorskip("transformers")

    def without_quantization(values):
        return {k: v for k, v in values.items() if k not in ("model_type", "quantization_config")}

    values = without_quantization(CONFIGS[name])
    if "text_config" in values:
        values["text_config"] = without_quantization(values["text_config"])
    if name == "dbrx":
        values["ffn_config"] = {**values["ffn_config"], "moe_normalize_expert_weights": 1.0}
    model_type = CONFIGS[name]["model_type"]
    if name == "kimi-k2":
        model_type = "deepseek_v3"  # whose class it uses
    config = transformers.AutoConfig.for_model(model_type, **values)
    layer_idx = 5 if name in NEEDS_LAYER else None
    expected = MoEConfig.from_hf({**values, "model_type": model_type}, layer_idx)
    got = MoEConfig.from_hf(config, layer_idx)
    for field in fields(MoEConfig):
        wanted = getattr(expected, field.name)
        # A class knows which layers are MoE layers where the file does not say.
        if not (field.name == "moe_layers" and wanted is None):
            assert getattr(got, field.name) == wanted, field.name
