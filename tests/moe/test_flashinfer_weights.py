# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Prepared weights: what is refused, and the quantization of activations."""

import pytest
import torch

from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.flashinfer_inputs import quantize_fp8_groups
from sgl_moe_jit.moe.runners.flashinfer_trtllm import FlashInferTrtllmRunner
from tests.moe.flashinfer_cases import (
    F32,
    WIDTH,
    E,
    H,
    assert_right,
    make_input,
    make_layer,
    make_topk,
)
from tests.moe.flashinfer_fake import FakeFlashInfer, make_runner

NONE, FP8, NVFP4, MXFP4 = (
    Quantization.NONE,
    Quantization.FP8_BLOCK,
    Quantization.NVFP4,
    Quantization.MXFP4,
)


def scale(quantization):
    return make_layer(quantization).weights.gemm1_weights_scale


# quantization, what is changed, kind of error, its text
WRONG = {
    "no scale": (FP8, {"gemm1_weights_scale": None}, ValueError,
                 "gemm1_weights_scale: expected a tensor for quantization fp8_block, got None"),
    "no tensor scale": (NVFP4, {"output2_scale_scalar": None}, ValueError,
                        "output2_scale_scalar: expected a tensor for quantization nvfp4"),
    "no input scale": (NVFP4, {"input_global_scale": None}, ValueError,
                       "input_global_scale: expected a tensor for quantization nvfp4"),
    "a scale too many": (NONE, {"gemm1_weights_scale": torch.ones(E)}, ValueError,
                         "gemm1_weights_scale: expected None for quantization none, got a tensor"),
    "a bias": (FP8, {"gemm1_bias": torch.ones(E, 2 * WIDTH)}, ValueError,
               "gemm1_bias: expected None for quantization fp8_block"),
    "bias dtype": (MXFP4, {"gemm1_bias": torch.ones(E, 2 * WIDTH).half()}, TypeError,
                   "gemm1_bias: expected torch.float32, got torch.float16"),
    "scale dtype": (MXFP4, {"gemm1_weights_scale": scale(MXFP4).view(torch.uint8)}, TypeError,
                    "gemm1_weights_scale: expected torch.float8_e4m3fn, got torch.uint8"),
    "short scale": (MXFP4, {"gemm1_weights_scale": scale(MXFP4)[:, :8].contiguous()}, ValueError,
                    r"gemm1_weights_scale: expected \(4, 256, 4\), got \(4, 8, 4\)"),
    "plain layout": (NONE, {"gemm1_weights": torch.ones(E, 2 * WIDTH, H).bfloat16()}, ValueError,
                     r"gemm1_weights: expected 4 dimensions, got \(4, 256, 128\)"),
    "dtype": (NONE, {"gemm2_weights": make_layer(NONE).weights.gemm2_weights.float()}, TypeError,
              "gemm2_weights: expected torch.bfloat16, got torch.float32"),
    "width": (FP8, {"intermediate_dim": 256}, ValueError,
              r"gemm1_weights: expected \(4, 512, 128\), got \(4, 256, 128\)"),
    "odd width": (FP8, {"intermediate_dim": 100}, ValueError,
                  "intermediate_dim: expected a multiple of 128, got 100; pad the weights"),
    "narrow": (FP8, {"hidden_dim": 256}, ValueError,
               r"gemm2_weights: expected a hidden size of 256 or more, got 128 in \(4, 128, 128\)"),
    "strided": (FP8, {"gemm2_weights": torch.ones(E, H, WIDTH).to(torch.float8_e4m3fn).mT},
                ValueError, r"gemm2_weights: expected a contiguous tensor, got strides"),
    "elsewhere": (FP8, {"gemm1_weights_scale": torch.ones(E, 2, 1, device="meta")}, ValueError,
                  "gemm1_weights_scale: expected a tensor on cpu, got meta"),
    "per tensor": (FP8, {"quantization": Quantization.FP8_PER_TENSOR}, ValueError,
                   "quantization: backend trtllm is called for .* prepare .* for backend cutlass"),
    "backend": (FP8, {"backend": "triton"}, ValueError,
                "backend: expected trtllm or cutlass, got 'triton'"),
    "no gate": (NONE, {"has_gate": False}, ValueError,
                r"gemm1_weights: expected \(4, 2, 128, 64\), got \(4, 2, 256, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_named(name):
    quantization, change, kind, why = WRONG[name]
    with pytest.raises(kind, match=why):
        make_layer.__wrapped__(quantization, **change)


def test_padded_scales_and_blocks_are_taken():
    """Interleaved scales may be longer; FP8_BLOCK matrices may come in blocks along K."""
    longer = torch.cat([scale(MXFP4), scale(MXFP4)], dim=2)
    assert make_layer.__wrapped__(MXFP4, gemm1_weights_scale=longer).weights
    runner, layer, fake = make_runner(FP8, block_major=True)
    assert layer.weights.is_block_major and layer.weights.padded_hidden_dim == H
    x, topk = make_input(FP8), make_topk()
    assert_right(runner.run(x, topk, defer=False), layer.plain, x, topk)
    assert fake.calls[-1][1]["weight_layout"] == 2
    assert make_runner(FP8)[0]._arguments["trtllm_fp8_block_scale_moe"]["weight_layout"] == 0


def test_fp4_extras_reach_the_call():
    extras = {
        "gemm1_bias": torch.ones(E, 2 * WIDTH),
        "gemm2_bias": torch.ones(E, H),
        "gemm1_clamp_limit": torch.ones(E),
    }
    weights = make_layer.__wrapped__(MXFP4, **extras).weights
    fake = FakeFlashInfer("0.7.4")
    runner = FlashInferTrtllmRunner(weights, functions=fake.functions())
    arguments = runner._arguments["trtllm_fp4_block_scale_routed_moe"]
    assert all(arguments[name] is tensor for name, tensor in extras.items())
    # Declared where the version asks for it: leaving it out warns there.
    assert arguments["hidden_states_scale_layout"] == 2
    older = FlashInferTrtllmRunner(weights, functions=FakeFlashInfer("0.6.15").functions())
    older = older._arguments["trtllm_fp4_block_scale_routed_moe"]
    assert "hidden_states_scale_layout" not in older


def test_bfloat16_activations_for_mxfp4():
    layer = make_layer.__wrapped__(MXFP4, quantize_input=lambda x: (x, None))
    fake = FakeFlashInfer("0.7.4")
    runner = FlashInferTrtllmRunner(layer.weights, functions=fake.functions())
    x, topk = make_input(NONE) / 3, make_topk()
    assert_right(runner.run(x, topk, defer=True).finalize(), layer.plain, x, topk)
    assert fake.calls[-1][1]["hidden_states_scale"] is None and len(fake.calls) == 1


def test_fp8_groups():
    x = torch.randn(3, 256) * torch.logspace(-6, 6, 3)[:, None]
    x[0, :128] = 0
    values, groups = quantize_fp8_groups(x.bfloat16())
    assert values.dtype == torch.float8_e4m3fn and groups.dtype == F32
    assert groups.shape == (2, 3) and groups.is_contiguous() and groups[0, 0] == 1
    back = values.float() * groups.t().repeat_interleave(128, 1)
    # e4m3: 2^-4 of a value, and 2^-10 of the group's scale below its normal range
    largest = x.bfloat16().float().unflatten(1, (2, 128)).abs().amax(-1).repeat_interleave(128, 1)
    assert ((back - x.bfloat16().float()).abs() <= 2**-4 * x.abs() + 2**-10 / 448 * largest).all()
    x[1, 130] = float("nan")
    values, groups = quantize_fp8_groups(x.bfloat16())
    assert values[1, 130].isnan() and not values[0].float().isnan().any()
    assert quantize_fp8_groups(torch.empty(0, 256).bfloat16())[1].shape == (2, 0)
