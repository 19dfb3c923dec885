# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 experts in layers: scales as parameters, updates, refusals, gradients, who serves them."""

import copy
from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners import create_runner, explain, select_runner
from tests.moe.fp8_cases import assert_like_the_model, install_emulation, make_fp8_weights
from tests.moe.runner_cases import BF16, HIDDEN, make_input, make_topk

both_runners = pytest.mark.parametrize("name", ["native", "grouped_mm"])


@pytest.fixture
def emulated(monkeypatch):
    install_emulation(monkeypatch)


def make_layer(name="native", **options):
    w = make_fp8_weights(**options)
    return FusedMoE.from_w13_w2(
        w.up, w.down, w13_scale=w.up_scale, w2_scale=w.down_scale, runner=name
    )


def assert_right(layer, x, topk):
    assert_like_the_model(layer(x, topk), layer.expert_weights(), x, topk)


@both_runners
@pytest.mark.parametrize("checkpoint_scales", [False, True])
def test_a_layer_with_scales(name, checkpoint_scales, emulated):
    """Scales [E, N] or, as compressed-tensors checkpoints have them, [E, N, 1]."""
    layer = make_layer(name, checkpoint_scales=checkpoint_scales)
    assert list(layer.state_dict()) == [
        "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale",
    ]  # fmt: skip
    x, topk = make_input(7, dtype=BF16), make_topk(7)
    assert_right(layer, x, topk)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x, topk), layer(x, topk))
    before = layer(x, topk)
    with torch.no_grad():
        layer.w2_weight_scale.mul_(2.0)
    assert torch.equal(layer(x, topk), before * 2)
    layer.w2_weight_scale.data = layer.w2_weight_scale.data / 2
    assert torch.equal(layer(x, topk), before)
    doubled = torch.nn.Parameter(layer.w2_weight_scale * 2, requires_grad=False)
    layer.w2_weight_scale = doubled  # another object, the weights being the same
    assert torch.equal(layer(x, topk), before * 2)
    new = {k: v if "scale" not in k else v * 4 for k, v in layer.state_dict().items()}
    layer.load_state_dict(new, assign=True)
    assert_right(layer, x, topk)
    assert not torch.equal(layer(x, topk), before)


def test_a_layer_without_scales_has_no_such_names():
    w = make_fp8_weights().dequantized()
    layer = FusedMoE.from_w13_w2(w.up, w.down)
    assert list(layer.state_dict()) == ["w13_weight", "w2_weight"]


def test_input_major_weights_go_to_native():
    weights = make_fp8_weights(is_transposed=True)
    layer = FusedMoE.from_gate_up_down(
        weights.up, weights.down, is_transposed=True, is_concatenated=True,
        gate_up_proj_scale=weights.up_scale, down_proj_scale=weights.down_scale,
    )  # fmt: skip
    x, topk = make_input(7, dtype=BF16), make_topk(7)
    assert_right(layer, x, topk)
    assert "gate_up_proj_scale" in layer.state_dict()


def test_a_cast_of_the_module_is_refused_at_the_next_call():
    layer = make_layer().to(BF16)
    with pytest.raises(TypeError, match=r"up_scale: expected float32 scales beside float8_e4m3fn .*"
                       r"got scales beside torch.bfloat16; .*\.to\(device\) alone"):  # fmt: skip
        layer(make_input(4, dtype=BF16), make_topk(4))


W = make_fp8_weights()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"up_scale": None}, TypeError, r"up_scale: expected float32 scales .* got None"),
        ({"down_scale": None}, TypeError, r"down_scale: expected float32 scales .* got None"),
        ({"up_scale": W.up_scale.bfloat16()}, TypeError,
         r"up_scale: expected float32, got torch.bfloat16; convert it with .float\(\)"),
        ({"down_scale": W.down_scale[:, :1]}, ValueError,
         r"down_scale: expected \(6, 32\), one for each output row, .* got \(6, 1\)"),
        ({"up_scale": W.up_scale.t()}, ValueError, r"up_scale: expected \(6, 32\), .* \(32, 6\)"),
        ({"down_scale": W.down_scale.to("meta")}, ValueError,
         "down_scale: expected on cpu, got meta"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit(changes, error, match):
    weights = replace(W, **changes)
    with pytest.raises(error, match=match):
        RunnerConfig.of(weights)
    with pytest.raises(error, match=match):
        create_runner("auto", weights)


@both_runners
def test_the_input_is_bfloat16(name, emulated):
    runner, x = create_runner(name, make_fp8_weights()), make_input(4)
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16 for experts in fp8_per_"
                       r"channel, got torch.float32; convert them with .to\(\)"):  # fmt: skip
        runner.run(x, make_topk(4), defer=False)


@both_runners
def test_gradients_are_refused_by_name(name, emulated):
    weights = make_fp8_weights(bias=True, norm=True)
    x, topk = make_input(4, dtype=BF16), make_topk(4)
    leaves = {
        "hidden_states": x,
        "up_bias": weights.up_bias,
        "down_scale": weights.down_scale,
        "post_expert_norm.weight": weights.post_expert_norm.weight,
    }
    runner = create_runner(name, weights)
    for leaf, tensor in leaves.items():
        tensor.requires_grad_()
        ways = r"torch.no_grad\(\) .* ExpertWeights.dequantized\(\)"
        match = rf"runner '{name}': {leaf} requires a gradient, .* {ways}"
        with pytest.raises(UnsupportedError, match=match):
            runner.run(x, topk, defer=False)
        with torch.no_grad():
            runner.run(x, topk, defer=False)
        tensor.requires_grad_(False)
    # The router's weights are another matter: their gradient passes no expert.
    weight = topk.topk_weights.requires_grad_()
    out = runner.run(x, topk, defer=False)
    (grad,) = torch.autograd.grad(out.float().sum(), weight)
    rows = runner.run(x, topk, defer=True)
    index = rows.expanded_idx_to_permuted_idx.long()
    want = rows.gemm2_out.double().sum(-1)[index.clamp(min=0)].masked_fill(index < 0, 0)
    # A bfloat16 step of each output element at most separates the two.
    torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-4)


def test_the_way_out_has_gradients_and_takes_adapters():
    """dequantized() is a plain layer: an adapter on its gate_up weights trains and takes effect."""
    weights = make_fp8_weights().dequantized()
    assert weights.quantization is Quantization.NONE and weights.up.dtype == BF16
    exact = W.up.double() * W.up_scale.double()[..., None]
    assert ((weights.up.double() - exact).abs() <= 2.0**-8 * exact.abs()).all()
    a = torch.zeros(6, HIDDEN, 2, dtype=BF16, requires_grad=True)
    b = torch.randn(6, 2, HIDDEN, dtype=BF16)
    adapted = replace(weights, up=weights.up + a @ b)
    x, topk = make_input(4, dtype=BF16), make_topk(4)
    out = create_runner("grouped_mm", adapted).run(x, topk, defer=False)
    (grad,) = torch.autograd.grad(out.float().square().sum(), a)
    assert grad.abs().sum() > 0
    assert weights.dequantized() is weights


def config_of(**changes):
    sizes = RunnerConfig(
        8, 7168, 2048, BF16, torch.device("cuda", 0), False, True, Quantization.FP8_PER_CHANNEL
    )
    return replace(sizes, **changes)


def pretend(monkeypatch, capability):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


NEEDS = "device: torch's scaled_grouped_mm with scales by row needs compute capability 9.0"


@pytest.mark.parametrize(
    ("capability", "changes", "why"),
    [
        ((8, 9), {}, f"{NEEDS}, got 8.9"),
        ((10, 0), {}, f"{NEEDS}, got 10.0"),
        ((9, 0), {"device": torch.device("cpu")}, f"{NEEDS}, got cpu"),
        ((9, 0), {"is_transposed": True}, "is_transposed: torch's scaled_grouped_mm reads"),
        ((9, 0), {"hidden_dim": 7176}, "strides: torch's scaled_grouped_mm needs sizes that are "
         "multiples of 16 and rows that start on multiples of 16 bytes; got hidden_dim 7176"),
        ((9, 0), {"intermediate_dim": 2056}, "intermediate_dim 2056"),
        ((9, 0), {"aligned_16_bytes": False}, "strides: "),
        ((9, 0), {"num_experts": 1024}, "num_experts: at most 1023, got 1024"),
    ],
)  # fmt: skip
def test_when_grouped_mm_serves_fp8_and_why_not(monkeypatch, capability, changes, why):
    pretend(monkeypatch, (9, 0))
    plan = explain(config_of())
    assert plan.runner == "grouped_mm" and plan.can_defer
    assert "torch.nn.functional.scaled_grouped_mm, scales by row" in plan.reason
    pretend(monkeypatch, capability)
    plan = explain(config_of(**changes))
    assert dict(plan.refused)["grouped_mm"].startswith(why) or why in str(plan)
    assert plan.runner == "native"
    assert "dequantized to float32 as it is used" in plan.reason
    with pytest.raises(UnsupportedError, match="runner 'grouped_mm' cannot serve this layer"):
        select_runner("grouped_mm", config_of(**changes))


def test_an_old_torch_and_another_makers_gpu_are_reasons(monkeypatch):
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "another maker's GPU" in dict(explain(config_of()).refused)["grouped_mm"]
    monkeypatch.delattr(torch.nn.functional, "scaled_grouped_mm")
    why = dict(explain(config_of()).refused)["grouped_mm"]
    assert why.endswith("has no torch.nn.functional.scaled_grouped_mm; needs 2.10")


def test_formats_of_configurations():
    form = Quantization.of_format
    assert form("fp8 e4m3 channel") is Quantization.FP8_PER_CHANNEL
    assert form("fp8 e4m3 128x128") is Quantization.FP8_BLOCK
    assert form(None) is Quantization.NONE
    with pytest.raises(UnsupportedError, match=r"quantization: expected one of .*, got int4 g32"):
        form("int4 g32")
