# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Formats of routed and shared experts: one checkpoint for each way of stating them."""

import copy

import pytest

from sgl_moe_jit.moe.config import MoEConfig
from tests.moe.test_from_hf import CONFIGS

FP8 = "fp8 e4m3 128x128"
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
SHARED_OUT = ["*.attn.*", "*.shared_experts.*", "head", "mtp.*"]
NVFP4_GROUP = {
    "format": "nvfp4-pack-quantized",
    "targets": ["re:.*ffn.*(gate|up|down)_proj$"],
    "weights": {"num_bits": 4, "type": "float", "group_size": 16, "block_structure": None},
}
FP8_GROUP = {
    "format": "float-quantized",
    "targets": ["re:.*attn.*"],
    "weights": {"num_bits": 8, "type": "float", "group_size": None, "block_structure": [128, 128]},
}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": [],
    "config_groups": {"group_0": FP8_GROUP, "group_1": NVFP4_GROUP},
}
CHANNEL_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def per_channel(activations):
    group = {"targets": ["Linear"], "weights": CHANNEL_WEIGHTS, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


def listed(routed, shared=None, block="ffn", layers=60):
    found = {f"layers.{i}.{block}.experts": routed for i in range(layers)}
    if shared:
        found |= {f"layers.{i}.{block}.shared_experts.down_proj": shared for i in range(layers)}
    return {"quant_algo": "MIXED_PRECISION", "group_size": 16, "quantized_layers": found}


def formats(name, quantization=None, outside=False, **changes):
    values = copy.deepcopy(CONFIGS[name])
    inner = values.get("text_config", values)
    inner.update(changes)
    if quantization is not None:
        inner.pop("quantization_config", None)
        (values if outside else inner)["quantization_config"] = quantization
    moe = MoEConfig.from_hf(values, 5)
    return moe.quantization, moe.shared_experts and moe.shared_experts.quantization


# Shared experts may be fused with the routed ones where both formats are one; here the first row.
@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (formats("deepseek-v3"), (FP8, FP8)),
        (formats("kimi-k2"), (FP8, FP8)),
        (formats("glm-5", BLOCK), (FP8, FP8)),
        (formats("minimax-m2.5"), (FP8, None)),  # it has no shared expert
        (formats("step-3.7-flash", BLOCK), (FP8, FP8)),
        (formats("deepseek-v4-flash"), ("fp4", FP8)),
        (formats("deepseek-v4-pro"), ("fp4", FP8)),
        (
            formats("deepseek-v4-pro", {**listed(NVFP4), "exclude_modules": SHARED_OUT}),
            ("nvfp4 g16", None),
        ),
        (formats("kimi-k2.5"), ("int4 g32", None)),
        (formats("kimi-k3"), ("mxfp4 g32", None)),
        (formats("glm-5.2", NVFP4), ("nvfp4 g16", "nvfp4 g16")),
        (
            formats("glm-5.2", {**NVFP4, "ignore": ["model.layers.5.mlp.shared_experts*"]}),
            ("nvfp4 g16", None),
        ),
        (
            formats("minimax-m3", listed(NVFP4, {"quant_algo": "MXFP8"}, "block_sparse_moe"), True),
            ("nvfp4 g16", "mxfp8"),
        ),
        (formats("gpt-oss-120b"), ("mxfp4 g32", None)),
        # Groups with targets: both kinds of experts in the second.
        (formats("deepseek-v4-flash", MIXED), ("nvfp4 g16", "nvfp4 g16")),
        (formats("glm-5", per_channel(BY_TOKEN)), ("fp8 e4m3 channel",) * 2),
        (formats("glm-5", per_channel(None)), ("fp8 e4m3 channel, weights only",) * 2),
        (
            formats("glm-5", per_channel({**BY_TOKEN, "strategy": "tensor", "dynamic": False})),
            ("fp8 e4m3 channel, activations not by token",) * 2,
        ),
        (formats("mixtral-8x7b"), (None, None)),
        (formats("deepseek-v3", {"quant_method": "fp8"}), ("fp8 e4m3", "fp8 e4m3")),
        # Not known here: under its own name, which is enough to see whether two are alike.
        (
            formats("deepseek-v3", {"quant_method": "awq", "bits": 4, "group_size": 128}),
            ("awq int4 g128", "awq int4 g128"),
        ),
        (
            formats(
                "deepseek-v3",
                {**BLOCK, "modules_to_not_convert": ["shared_experts", "gate", "lm_head"]},
            ),
            (FP8, None),
        ),
    ],
)
def test_formats(found, expected):
    assert found == expected


def test_a_pattern_matches_whole_parts_of_a_name():
    # "experts" names the routed ones, and is no part of "shared_experts".
    assert formats("deepseek-v3", {**BLOCK, "ignored_layers": ["experts"]}) == (None, FP8)


def without(key):
    return {k: v for k, v in CHANNEL_WEIGHTS.items() if k != key}


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, "config_groups.g.weights: expected a mapping, got none"),
        ({"weights": without("type")}, "config_groups.g.weights.type: expected a value, got none"),
        ({"weights": without("num_bits")}, "config_groups.g.weights.num_bits: expected a value, "),
        (
            {"targets": "Linear"},
            "config_groups.g.targets: expected a list of strings, got 'Linear'",
        ),
        (None, "config_groups.g: expected a mapping, got none"),
        (
            {"weights": {**CHANNEL_WEIGHTS, "block_structure": 8}},
            "structure: expected a list of int",
        ),
        ({"weights": CHANNEL_WEIGHTS, "input_activations": 8}, "activations: expected a mapping"),
    ],
)
def test_a_group_that_says_too_little_is_refused_by_key(group, expected):
    with pytest.raises(ValueError, match=expected + ".*; see the checkpoint's config.json"):
        formats("glm-5", {"quant_method": "compressed-tensors", "config_groups": {"g": group}})


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("fp8", "quantization_config: expected a mapping, got 'fp8'"),
        ({**BLOCK, "weight_block_size": 128}, "weight_block_size: expected a list of integers"),
        ({**BLOCK, "modules_to_not_convert": "gate"}, "to_not_convert: expected a list of strings"),
        ({"config_groups": ["g"]}, r"config_groups: expected a mapping, got \['g'\]"),
        (listed(None), "quantized_layers.layers.5.ffn.experts: expected a mapping, got none"),
        (listed({"group_size": 16}), "quant_algo: expected the name of an algorithm, got none"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_key(quantization, expected):
    with pytest.raises(ValueError, match=expected + ".*; see the checkpoint's config.json"):
        formats("deepseek-v3", quantization)
