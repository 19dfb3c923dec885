# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""When shared experts are fused: models, overlap, backends, contradictions, and the weight."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.ep import (
    SharedExpertFusionConfig,
    determine_num_fused_shared_experts,
    fused_shared_expert_weight,
    is_deepep_class_backend,
)
from sgl_moe_jit.ep.backends import BACKENDS
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.config import MoEConfig
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from tests.moe.test_from_hf import CONFIGS
from tests.moe.test_hf_quantization import BLOCK, FP8, NVFP4, SHARED_OUT, listed

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "ep_layout.json").read_text())
field_report = pytest.mark.field_report
determine = determine_num_fused_shared_experts
Config = SharedExpertFusionConfig

OUT = {"ignore": ["model.layers.5.mlp.shared_experts*"]}
M3 = {**listed(NVFP4, {"quant_algo": "MXFP8"}, "block_sparse_moe"), "outside": True}
V4_OUT = {**listed(NVFP4), "exclude_modules": SHARED_OUT}


def model(name, quantization=None) -> MoEConfig:
    values = copy.deepcopy(CONFIGS[name])
    inner = values.get("text_config", values)
    if quantization is not None:
        quantization = dict(quantization)
        inner.pop("quantization_config", None)
        place = values if quantization.pop("outside", False) else inner
        place["quantization_config"] = quantization
    return MoEConfig.from_hf(values, 5)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("deepseek-v3", None),
        ("deepseek-v3.2", BLOCK),
        ("kimi-k2", None),
        ("glm-5", BLOCK),
        ("step-3.7-flash", BLOCK),
    ],
)
def test_one_format_and_one_width_may_be_fused(name, quantization):
    found = model(name, quantization)
    assert found.quantization == found.shared_experts.quantization == FP8
    assert determine(Config.from_model(found))[0] == 0  # off by default
    assert determine(Config.from_model(found, enable_fusion=True)) == (1, "enable_fusion=True")
    assert determine(Config.from_model(found, enable_waterfill=True)) == (
        1,
        "enable_waterfill=True",
    )


@pytest.mark.parametrize(
    ("name", "quantization", "routed", "shared"),
    [
        ("deepseek-v4-flash", None, "fp4", FP8),
        ("deepseek-v4-pro", None, "fp4", FP8),
        ("deepseek-v4-pro", V4_OUT, "nvfp4 g16", "not quantized"),
        ("kimi-k2.5", None, "int4 g32", "not quantized"),
        ("kimi-k3", None, "mxfp4 g32", "not quantized"),
        ("glm-5.2", {**NVFP4, **OUT}, "nvfp4 g16", "not quantized"),
        ("kimi-k2", {**NVFP4, **OUT}, "nvfp4 g16", "not quantized"),
        ("minimax-m3", M3, "nvfp4 g16", "mxfp8"),
    ],
)
def test_two_formats_are_refused_by_name(name, quantization, routed, shared):
    found = model(name, quantization)
    named = f"routed experts are {routed}, shared experts {shared}"
    for switches in ({}, {"enable_fusion": True}):
        n, reason = determine(Config.from_model(found, **switches))
        assert n == 0 and named in reason
    with pytest.raises(UnsupportedError, match="enable_waterfill=True: expected"):
        determine(Config.from_model(found, enable_waterfill=True))
    if name == "kimi-k3":  # whose shared experts work on another hidden size
        with pytest.raises(UnsupportedError, match="3584 values a token and they on 7168"):
            determine(Config.from_model(found, enforce_fusion=True))
    else:
        n, reason = determine(Config.from_model(found, enforce_fusion=True))
        assert n == 1 and reason.startswith("enforce_fusion=True, although") and named in reason


@pytest.mark.parametrize("name", ["gpt-oss-120b", "minimax-m2.5", "mixtral-8x7b"])
def test_without_shared_experts_there_is_nothing_to_fuse(name):
    n, reason = determine(Config.from_model(model(name), enable_fusion=True))
    assert (n, reason) == (0, "the model has no shared experts")
    for switch in ("enforce_fusion", "enable_waterfill"):
        with pytest.raises(UnsupportedError, match=f"{switch}=True.*no shared experts"):
            determine(Config.from_model(model(name), **{switch: True}))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3-next-80b-a3b", "a gate on the input scales them"),
        ("qwen1.5-moe-a2.7b", "a gate on the input scales them"),
        ("nemotron-3-super-120b", "1024 values a token and they on 4096"),
    ],
)
def test_what_no_switch_can_change(name, reason):
    assert reason in determine(Config.from_model(model(name), enable_fusion=True))[1]
    with pytest.raises(UnsupportedError, match=reason):
        determine(Config.from_model(model(name), enforce_fusion=True))


def test_a_shared_mlp_of_two_widths_is_two_slots():
    config = Config.from_model(model("deepseek-v2"), enable_fusion=True)
    assert determine(config)[0] == 2
    with pytest.raises(UnsupportedError, match="one shared slot a token, and this model has 2"):
        determine(Config.from_model(model("deepseek-v2"), enable_waterfill=True))


@pytest.mark.parametrize("overlap", ["two_batch_overlap", "single_batch_overlap"])
def test_overlap_turns_fusion_off_unless_enforced(overlap):
    n, reason = determine(Config(enable_fusion=True, **{overlap: True}))
    assert n == 0 and overlap in reason
    n, reason = determine(Config(enforce_fusion=True, **{overlap: True}))
    assert n == 1 and overlap in reason
    n, _ = determine(Config(enforce_fusion=True, enable_waterfill=True, **{overlap: True}))
    assert n == 1


def test_default_is_off():
    assert determine(Config())[0] == 0
    assert determine(Config(disable_fusion=True)) == (0, "disable_fusion=True")


@field_report("E5")
@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({"enable_waterfill", "disable_fusion"}, ["enable_waterfill", "disable_fusion"]),
        ({"enforce_fusion", "disable_fusion"}, ["enforce_fusion", "disable_fusion"]),
        ({"enable_fusion", "disable_fusion"}, ["enable_fusion", "disable_fusion"]),
        ({"enable_waterfill", "two_batch_overlap"}, ["enable_waterfill", "two_batch_overlap"]),
        (
            {"enable_waterfill", "disable_fusion", "single_batch_overlap"},
            ["enable_waterfill", "disable_fusion", "single_batch_overlap"],
        ),
    ],
)
def test_switches_that_contradict_each_other_give_one_message(switches, named):
    with pytest.raises(ValueError) as info:
        Config(**dict.fromkeys(switches, True))
    assert all(f"{name}=True" in str(info.value) for name in named), info.value
    assert "take one side back" in str(info.value)


def test_every_combination_of_switches_is_obeyed_or_refused():
    names = ("enable_waterfill", "enforce_fusion", "disable_fusion", "enable_fusion")
    overlaps = ("two_batch_overlap", "single_batch_overlap")
    for values in itertools.product([False, True], repeat=6):
        on = dict(zip((*names, *overlaps), values, strict=True))
        waterfill, enforce, disable, enable = values[:4]
        overlap = any(values[4:])
        contradiction = (disable and (waterfill or enforce or enable)) or (
            waterfill and overlap and not enforce
        )
        if contradiction:
            with pytest.raises(ValueError):
                Config(**on)
            continue
        n, _ = determine(Config(**on))
        assert n == int(enforce or waterfill or (enable and not overlap)), on


def test_waterfill_from_the_environment(monkeypatch):
    monkeypatch.delenv(env.ENABLE_WATERFILL.name, raising=False)
    assert not Config.from_environment().enable_waterfill
    monkeypatch.setenv(env.ENABLE_WATERFILL.name, "1")
    assert Config.from_environment().enable_waterfill
    assert not Config().enable_waterfill  # what is written in the code is what it says
    assert not Config.from_environment(enable_waterfill=False).enable_waterfill
    with pytest.raises(ValueError, match=f"disable_fusion|{env.ENABLE_WATERFILL.name}") as info:
        Config.from_environment(disable_fusion=True)
    assert env.ENABLE_WATERFILL.name in str(info.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "deepp"}, ValueError, "backend: expected one of none, torch, deepep,"),
        ({"ep_size": 0}, ValueError, "ep_size: expected at least 1, got 0"),
        ({"num_shared_experts": -1}, ValueError, "num_shared_experts: expected at least 0"),
        ({"enable_waterfill": 1}, TypeError, "enable_waterfill: expected a bool, got 1"),
        ({"two_batch_overlap": "no"}, TypeError, "two_batch_overlap: expected a bool, got 'no'"),
        ({"routed_quantization": 5}, TypeError, "routed_quantization: expected a str or None, go"),
    ],
)
def test_nonsense_is_refused(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Config(**options)


def test_backends():
    deepep_class = {name for name in BACKENDS if is_deepep_class_backend(name)}
    assert deepep_class == {"torch", "deepep", "deepep_v2", "mooncake", "mori", "pplx"}
    with pytest.raises(ValueError, match="backend: expected one of"):
        is_deepep_class_backend("DeepEP")
    for name in ("none", "flashinfer"):
        with pytest.raises(ValueError, match=f"backend='{name}', which has no shared slots"):
            Config(enable_waterfill=True, backend=name)
    n, reason = determine(Config(enable_fusion=True, backend="flashinfer"))
    assert n == 0 and "no slots for shared experts" in reason
    with pytest.raises(UnsupportedError, match="no slots for shared experts"):
        determine(Config(enforce_fusion=True, backend="flashinfer"))


def test_all_reduce_fuses_on_one_rank_and_elsewhere_when_enforced():
    assert determine(Config(enable_fusion=True, backend="none"))[0] == 1
    n, reason = determine(Config(enable_fusion=True, backend="none", ep_size=8))
    assert n == 0 and "weight 1/8" in reason
    assert determine(Config(enforce_fusion=True, backend="none", ep_size=8))[0] == 1


@field_report("E4")
@pytest.mark.parametrize("case", VECTORS["shared_weight"], ids=lambda c: str(list(c.values())[:2]))
def test_weight_vectors(case):
    got = fused_shared_expert_weight(case["routed_scaling_factor"], case["already_in_topk_weights"])
    assert got == case["expected"]


@field_report("E4")
def test_weight_in_all_reduce_ep_and_at_factor_one():
    case = VECTORS["all_reduce_ep"]
    got = fused_shared_expert_weight(
        case["routed_scaling_factor"],
        case["already_in_topk_weights"],
        all_reduce_ep_size=case["ep_size"],
    )
    assert got == case["expected"]
    assert fused_shared_expert_weight(1.0, False) == 1.0
    assert fused_shared_expert_weight(2.5, True, all_reduce_ep_size=4) == 0.25
    for factor in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="routed_scaling_factor: expected a positive number"):
            fused_shared_expert_weight(factor, False)
    with pytest.raises(ValueError, match="all_reduce_ep_size: expected at least 1, got 0"):
        fused_shared_expert_weight(1.0, False, all_reduce_ep_size=0)


@field_report("E4")
@pytest.mark.parametrize("factor", [2.5, 2.827, 16.0, None])
@pytest.mark.parametrize("in_weights", [True, False])
def test_the_net_coefficient_of_the_shared_row_is_one(factor, in_weights):
    """The shared row alone through the finalize: only its net coefficient is left."""
    rows = torch.linspace(-3, 3, 64, dtype=torch.float32).view(1, 64)
    weight = fused_shared_expert_weight(factor, in_weights)
    late = 1.0 if in_weights or factor is None else factor
    output = DeferredFinalizeOutput(
        rows, torch.tensor([[0.7, weight]]), torch.tensor([[-1, 0]], dtype=torch.int32), 2, late
    ).finalize()
    # Three roundings of float32: of the weight, of the product, of the factor's product.
    assert ((output - rows).abs() <= 3 * 2.0**-24 * rows.abs()).all()
    if late != 1.0 and late != 16.0:  # rounded to bfloat16 it is not one, by far more than that
        short = torch.tensor(weight, dtype=torch.bfloat16).float() * late
        assert abs(float(short) - 1) > 1e-4
