# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""MoEConfig.from_hf: what it refuses by name, what null means, layers, limits and precision."""

import copy
import re

import pytest

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.config import MoEConfig
from sgl_moe_jit.moe.hf_families import FAMILIES
from tests.moe.test_from_hf import CONFIGS

field_report = pytest.mark.field_report


def changed(name, drop=(), **changes):
    """A model's configuration with keys changed or dropped."""
    values = copy.deepcopy(CONFIGS[name])
    inner = values.get("text_config", values)
    inner.update(changes)
    for key in drop:
        del inner[key]
    return values


def test_an_unknown_model_is_named_with_the_known_ones():
    with pytest.raises(UnsupportedError, match="model_type: expected one of ") as raised:
        MoEConfig.from_hf({"model_type": "inkling", "num_experts": 8, "num_experts_per_tok": 2})
    assert "got 'inkling'" in str(raised.value)
    assert all(family in str(raised.value) for family in FAMILIES)
    with pytest.raises(UnsupportedError, match="got 'axk2' in 'some_vlm'"):
        MoEConfig.from_hf({"model_type": "some_vlm", "text_config": {"model_type": "axk2"}})
    with pytest.raises(UnsupportedError, match="got none"):
        MoEConfig.from_hf({})
    with pytest.raises(TypeError, match="config: expected a transformers configuration or a map"):
        MoEConfig.from_hf("deepseek-ai/DeepSeek-V3")


# Whatever the outer model is called.
def test_a_known_text_model_in_an_unknown_one():
    values = {"model_type": "some_vlm", "text_config": CONFIGS["qwen3-30b-a3b"]}
    assert MoEConfig.from_hf(values) == MoEConfig.from_hf(CONFIGS["qwen3-30b-a3b"])


@pytest.mark.parametrize(
    ("name", "key", "tried"),
    [
        ("deepseek-v3", "n_routed_experts", "number of experts: tried n_routed_experts, num_exp"),
        ("mixtral-8x7b", "num_local_experts", "number of experts: tried n_routed_experts, num_e"),
        ("qwen3-30b-a3b", "num_experts_per_tok", "experts a token: tried num_experts_per_tok, "),
        # `top_k: 50` stands in this one.
        ("kimi-k3", "num_experts_per_token", "number of experts a token: tried num_experts_per_"),
        ("ernie-4.5-21b-a3b", "moe_k", "number of experts a token: tried .*moe_k"),
        ("deepseek-v3", "hidden_size", "hidden size: tried hidden_size"),
        ("deepseek-v3", "moe_intermediate_size", "width of an expert: tried moe_intermediate_size"),
        ("deepseek-v3", "norm_topk_prob", "renormalisation switch: tried norm_topk_prob, "),
        ("qwen3-30b-a3b", "norm_topk_prob", "renormalisation switch: tried norm_topk_prob, "),
        ("deepseek-v3", "routed_scaling_factor", "scaling factor: tried routed_scaling_factor, "),
        ("deepseek-v3", "n_group", "number of groups: tried n_group, num_expert_group"),
        ("deepseek-v3", "topk_group", "groups a token may choose from: tried topk_group"),
        ("deepseek-v2", "topk_method", "way to choose: tried topk_method"),
        ("deepseek-v3", "hidden_act", "activation: tried hidden_act"),
        ("minimax-m3", "swiglu_alpha", "gain of the gate: tried swiglu_alpha"),
        ("kimi-k3", "activation_situ_beta", "needs activation_situ_beta and activation_situ_lin"),
    ],
)
def test_a_missing_key_is_an_error_that_names_those_tried(name, key, tried):
    with pytest.raises(ValueError, match=tried):
        MoEConfig.from_hf(changed(name, drop=[key]))


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts_per_tok"])
@pytest.mark.parametrize("value", [None, 0, True, "8", -1])
def test_sizes_are_positive_integers(key, value):
    with pytest.raises(ValueError, match="number of experts"):
        MoEConfig.from_hf(changed("deepseek-v3", **{key: value}))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'soft"),
        ("kimi-k3", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func: exp"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', got 'greedy"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method: expected 'greedy' or 'group_"),
        ("deepseek-v3", {"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ("gpt-oss-20b", {"hidden_act": "relu"}, "hidden_act: expected 'silu', got 'relu'"),
        ("longcat-flash", {"zero_expert_type": "copy"}, "zero_expert_type: expected 'identity'"),
        ("glm-5.2", {"moe_router_dtype": "float64"}, "moe_router_dtype: expected float32, got"),
        ("deepseek-v3", {"swiglu_limit": 10.0}, "swiglu_limit: expected no such limit in this"),
        ("ling-3.0-flash", {"expert_swiglu_limit_list": [0, 4]}, "expert_swiglu_limit_list: exp"),
        ("deepseek-v4-pro", {"swiglu_alpha": 1.702}, "swiglu_alpha: expected no such limit"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 512}, "expected none in this fam"),
    ],
)
def test_an_unknown_value_is_refused_by_name(name, changes, expected):
    with pytest.raises(UnsupportedError, match=expected) as raised:
        MoEConfig.from_hf(changed(name, **changes))
    assert str(raised.value).startswith(MoEConfig.from_hf(CONFIGS[name]).model_type)


# Not Python's words about the value, nor a KeyError.
@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek-v3", {"model_type": 5}, "model_type: expected a string, got 5"),
        ("dbrx", {"ffn_config": None}, "ffn_config: expected a mapping, got none"),
        ("dbrx", {"ffn_config": [1]}, r"ffn_config: expected a mapping, got \[1\]"),
        ("deepseek-v3", {"num_hidden_layers": "61"}, "num_hidden_layers: expected an integer of 0"),
        ("minimax-m3", {"num_hidden_layers": 61.0}, "num_hidden_layers: expected an integer of 0"),
        ("deepseek-v3", {"first_k_dense_replace": 3.0}, "first_k_dense_replace: expected an int"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace: expected an int"),
        ("deepseek-v3", {"moe_layer_freq": 1.5}, "moe_layer_freq: expected an integer of 0"),
        ("deepseek-v4-pro", {"num_hash_layers": "3"}, "num_hash_layers: expected an integer"),
        (
            "llama-4-scout",
            {"interleave_moe_layer_step": 0},
            "moe_layer_step: expected an integer of",
        ),
        ("ernie-4.5-21b-a3b", {"moe_layer_start_index": "1"}, "start_index: expected an integer"),
        ("ernie-4.5-21b-a3b", {"moe_layer_end_index": -2}, "end_index: expected an integer of -1"),
        ("ernie-4.5-21b-a3b", {"moe_norm_min": "x"}, "moe_norm_min: expected a number, got 'x'"),
        ("step-3.7-flash", {"moe_layers_enum": "3,x"}, "moe_layers_enum: expected integers with"),
        ("qwen1.5-moe-a2.7b", {"decoder_sparse_step": "1"}, "sparse_step: expected an integer"),
        ("qwen1.5-moe-a2.7b", {"mlp_only_layers": 3}, "mlp_only_layers: expected a list of int"),
        ("nemotron-3-nano-30b", {"hybrid_override_pattern": 3}, "pattern: expected a list of str"),
        ("gpt-oss-20b", {"swiglu_limit": {}}, "swiglu_limit: expected a number, got {}"),
        ("minimax-m3", {"swiglu_alpha": "1"}, "swiglu_alpha: expected a number, got '1'"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(name, changes, expected):
    with pytest.raises(ValueError, match=expected + ".*; see the checkpoint's config.json"):
        MoEConfig.from_hf(changed(name, **changes), 5)


def test_dbrx_without_its_inner_configuration():
    with pytest.raises(ValueError, match="ffn_config: expected a mapping, got none; see the"):
        MoEConfig.from_hf(changed("dbrx", drop=["ffn_config"]))


def test_dbrx_knows_one_norm():
    values = copy.deepcopy(CONFIGS["dbrx"])
    values["ffn_config"]["moe_normalize_expert_weights"] = 2
    with pytest.raises(UnsupportedError, match="moe_normalize_expert_weights: expected 1"):
        MoEConfig.from_hf(values)
    values["ffn_config"]["moe_normalize_expert_weights"] = None
    assert not MoEConfig.from_hf(values).router.renormalize


def test_contradicting_keys():
    with pytest.raises(ValueError, match=r"keys contradict each other: .*'experts_per_token': 2"):
        MoEConfig.from_hf(changed("gpt-oss-20b", experts_per_token=2))
    assert MoEConfig.from_hf(changed("deepseek-v3", num_experts=256)).num_experts == 256


@pytest.mark.parametrize("off", [None, 0])
def test_null_and_zero_mean_off(off):
    moe = MoEConfig.from_hf(
        changed("deepseek-v3", routed_scaling_factor=off, n_shared_experts=off, n_group=off)
    )
    assert moe.router.routed_scaling_factor == 1.0 and moe.shared_experts is None
    assert moe.router.n_group == moe.router.topk_group == 1
    assert MoEConfig.from_hf(changed("deepseek-v4-pro", swiglu_limit=off)).activation.clamp is None


def test_switches():
    def router(name, **changes):
        return MoEConfig.from_hf(changed(name, **changes), 5).router

    assert router("hunyuan-a13b").n_group == 1
    assert router("kimi-k3", num_expert_group=8, topk_group=4).n_group == 8
    assert router("kimi-k3", num_expert_group=8, use_grouped_topk=False).n_group == 1
    assert not router("minimax-m2.5", use_routing_bias=False).has_correction_bias
    assert router("deepseek-v2", topk_method="greedy").n_group == 1
    assert router("step-3.7-flash").logits_dtype == "float32"
    assert router("step-3.7-flash", need_fp32_gate=False).logits_dtype == "model"
    assert router("qwen3-30b-a3b", moe_router_dtype="float32").logits_dtype == "float32"
    assert router("ernie-4.5-21b-a3b", moe_norm_min=1e-9).renormalize_epsilon == 1e-9
    with pytest.raises(ValueError, match="norm_topk_prob: expected true or false, got 1"):
        router("deepseek-v3", norm_topk_prob=1)


def test_lists_need_a_layer():
    values = changed("hunyuan-a13b", moe_topk=[8] * 16 + [4] * 16)
    with pytest.raises(ValueError, match="moe_topk: a list of 32, one entry a layer; pass layer_i"):
        MoEConfig.from_hf(values)
    assert MoEConfig.from_hf(values, 15).top_k == 8
    assert MoEConfig.from_hf(values, layer_idx=16).top_k == 4
    with pytest.raises(ValueError, match="layer_idx: expected 0 to 31, the entries of moe_topk"):
        MoEConfig.from_hf(values, 32)


def test_dense_layers_are_refused():
    with pytest.raises(ValueError, match="the MoE layers of deepseek_v3, 3 to 60; got 2, which"):
        MoEConfig.from_hf(CONFIGS["deepseek-v3"], 2)
    with pytest.raises(ValueError, match=r"the MoE layers of llama4, 1, 3, 5, .* got 4, which"):
        MoEConfig.from_hf(CONFIGS["llama-4-maverick"], 4)


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (1, (1, 2, 3, 4, 5)),
        (2, (2, 4)),
        ("2", (2, 4)),
        ([0, 0, 1, 1, 0, 1], (2, 3, 5)),
        ("0,0,1,1,0,1", (2, 3, 5)),
        ("[0, 0, 1, 1, 0, 1]", (2, 3, 5)),
        ("([0]*2+[1]*4)", (2, 3, 4, 5)),
        ("[0]*1+[0,1]*2+[1]", (2, 4, 5)),
    ],
)
def test_every_form_of_moe_layer_freq(freq, expected):
    values = changed(
        "deepseek-v3", moe_layer_freq=freq, num_hidden_layers=6, first_k_dense_replace=1
    )
    assert MoEConfig.from_hf(values).moe_layers == expected


def test_a_moe_layer_freq_that_is_none():
    with pytest.raises(ValueError, match=r"moe_layer_freq: expected .* got 'every second'"):
        MoEConfig.from_hf(changed("deepseek-v3", moe_layer_freq="every second"))


def test_hash_layers_have_no_bias():
    for layer_idx, has_bias in ((0, False), (2, False), (3, True), (None, True)):
        moe = MoEConfig.from_hf(CONFIGS["deepseek-v4-flash"], layer_idx)
        assert moe.router.has_correction_bias == has_bias


@field_report("A11")
def test_the_three_meanings_of_a_limit():
    def activation(name, layer_idx=None, **changes):
        moe = MoEConfig.from_hf(changed(name, **changes), layer_idx)
        return [
            a and (a.kind, a.clamp, a.limit)
            for a in (moe.activation, moe.shared_experts and moe.shared_experts.activation)
        ]

    assert activation("gpt-oss-20b") == [("swiglu_oai", "before", 7.0), None]
    assert activation("minimax-m3") == [("swiglu_oai", "before", 7.0)] * 2
    assert activation("deepseek-v4-pro") == [("silu", "before", 10.0)] * 2
    assert activation("step-3.7-flash", 42) == [("silu", None, None)] * 2
    assert activation("step-3.7-flash", 43) == [("silu", "after", 7.0), ("silu", "after", 16.0)]
    ling = {"swiglu_limits": [0] * 35 + [4] * 7, "swiglu_limits_shared": [0] * 40 + [7, None]}
    assert activation("ling-3.0-flash", 40, **ling) == [("silu", "after", 4), ("silu", "after", 7)]
    assert activation("ling-3.0-flash", 41, **ling) == [("silu", "after", 4), ("silu", None, None)]
    for no_limit in (None, 0, 0.0, float("inf"), -1):
        assert activation("deepseek-v4-pro", swiglu_limit=no_limit) == [("silu", None, None)] * 2


def test_every_family_is_in_the_table_or_shares_its_class():
    in_table = {MoEConfig.from_hf(c, 5).model_type for c in CONFIGS.values() if _has_layer_5(c)}
    others = set(FAMILIES) - in_table
    assert others <= {
        "dots1", "exaone_moe", "glm4v_moe", "hy_v4", "kimi_linear", "lfm2_moe", "llama4",
        "nemotron_h", "qwen3_vl_moe", "solar_open", "step3p5",
    }  # fmt: skip


def _has_layer_5(values):
    return not re.match("nemotron", values["model_type"])
