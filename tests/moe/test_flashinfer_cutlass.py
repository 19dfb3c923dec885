# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter to cutlass_fused_moe: finished output, in a fixed order, whatever is asked for."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import deferred_finalize_context
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners import create_runner
from sgl_moe_jit.moe.runners.flashinfer_cutlass import FlashInferCutlassRunner
from sgl_moe_jit.moe.topk import PackedTopKOutput, TopKFormat
from tests.moe.flashinfer_cases import (
    BF16,
    ROUTERS,
    WIDTH,
    E,
    H,
    assert_right,
    local,
    make_input,
    make_layer,
    make_logits,
    make_topk,
)
from tests.moe.flashinfer_fake import FakeFlashInfer
from tests.moe.flashinfer_signatures import every_version

NONE = Quantization.NONE
versions = pytest.mark.parametrize("version", every_version())


def make_runner(version="0.7.4", **changes):
    plain = make_layer(NONE).plain
    weights = FlashInferWeights(
        **{
            "backend": "cutlass",
            "quantization": NONE,
            "hidden_dim": H,
            "intermediate_dim": WIDTH,
            "gemm1_weights": plain.up.to(BF16),
            "gemm2_weights": plain.down.to(BF16),
        }
        | changes
    )
    fake = FakeFlashInfer(version)
    return FlashInferCutlassRunner(weights, functions=fake.functions()), plain, fake


@versions
@pytest.mark.field_report("F9")
def test_finished_output_whatever_is_asked_for(version):
    runner, plain, fake = make_runner(version)
    x, topk = make_input(NONE), make_topk(factor=2.5)
    assert not any(runner.can_defer(topk_format) for topk_format in TopKFormat)
    outs = [runner.run(x, topk, defer=defer) for defer in (True, False)]
    with deferred_finalize_context():
        outs.append(runner.run(x, topk))
    for out in outs:
        assert isinstance(out, torch.Tensor) and torch.equal(out, outs[0])
    assert_right(outs[0], plain, x, topk)
    native = create_runner("native", plain).run(x.float(), topk, defer=False)
    assert_right(native, plain, x, topk)
    # In the GEMM's epilogue rows are summed by atomics: another order in each run.
    assert fake.calls[-1][1]["use_fused_finalize"] is False


def test_the_order_can_be_left_to_flashinfer():
    weights = make_runner()[0]._weights
    fake = FakeFlashInfer("0.7.4")
    runner = FlashInferCutlassRunner(weights, functions=fake.functions(), deterministic=False)
    assert "use_fused_finalize" not in runner._arguments


@versions
def test_every_format(version):
    runner, plain, fake = make_runner(version, local_expert_offset=8)
    x, topk = make_input(NONE), make_topk(dtype=BF16)
    packed = PackedTopKOutput.pack(replace(topk, topk_ids=topk.topk_ids.clamp(-1, E)))
    assert torch.equal(runner.run(x, packed), runner.run(x, topk))
    logits = make_logits(ROUTERS[2])
    assert_right(runner.run(x, logits), plain, x, local(logits.to_standard(), 8))
    arguments = fake.calls[-1][1]
    assert arguments["token_selected_experts"].max() <= E
    assert arguments["fc1_expert_weights"] is runner._weights.gemm1_weights


def test_quantized_input_and_scales_are_passed_on():
    scales = tuple(torch.ones(1) for _ in range(4))
    layer = make_layer(NONE).plain
    eight_bit = {
        "quantization": Quantization.FP8_PER_TENSOR,
        "gemm1_weights": layer.up.to(torch.float8_e4m3fn),
        "gemm2_weights": layer.down.to(torch.float8_e4m3fn),
        "quant_scales": scales,
    }
    runner, _, fake = make_runner(
        **eight_bit, quantize_input=lambda x: (x.to(torch.float8_e4m3fn), None)
    )
    runner.run(make_input(NONE), make_topk())
    arguments = fake.calls[-1][1]
    assert arguments["input"].dtype == torch.float8_e4m3fn and arguments["input_sf"] is None
    assert all(a is b for a, b in zip(arguments["quant_scales"], scales, strict=True))
    with pytest.raises(ValueError, match="quantize_input: expected a function for fp8_per_tensor"):
        make_runner(**eight_bit)
    runner, _, fake = make_runner(
        **eight_bit | {"quantization": Quantization.FP8_BLOCK, "quant_scales": scales[:2]}
    )
    runner.run(make_input(NONE), make_topk())
    assert fake.calls[-1][1]["use_deepseek_fp8_block_scale"] is True
    with pytest.raises(ValueError, match=r"quant_scales: expected 2 tensors .* got 4"):
        make_runner(**eight_bit | {"quantization": Quantization.FP8_BLOCK})
    with pytest.raises(ValueError, match=r"quantization: backend cutlass .* got mxfp4"):
        make_runner(quantization=Quantization.MXFP4)


@pytest.mark.field_report("M6")
def test_no_tokens_call_nothing():
    runner, _, fake = make_runner()
    assert runner.run(make_input(NONE, 0), make_topk(0), defer=True).shape == (0, H)
    assert not fake.calls


@pytest.mark.field_report("M15")
def test_pdl_can_be_ruled_out(monkeypatch):
    runner, _, fake = make_runner()
    want = runner.run(make_input(NONE), make_topk())
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
    assert torch.equal(runner.run(make_input(NONE), make_topk()), want)
    assert "enable_pdl" not in fake.calls[0][1] and fake.calls[1][1]["enable_pdl"] is False


def test_a_broken_answer_is_refused():
    runner, _, fake = make_runner("0.6.15")
    fake._cutlass_fused_moe = lambda name, a: a["input"].float()
    with pytest.raises(
        UnsupportedError,
        match=r"flashinfer 0\.6\.15, cutlass_fused_moe: output: "
        r"expected bfloat16 \[5, 128\] on cpu, got float32 \[5, 128\] on cpu; install",
    ):
        runner.run(make_input(NONE), make_topk())


def test_a_version_without_the_fixed_order_is_refused():
    signatures = dict(every_version()["0.6.15"])
    signature = signatures["cutlass_fused_moe"]
    signatures["cutlass_fused_moe"] = signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name != "use_fused_finalize"]
    )
    fake = FakeFlashInfer("0.6.15", signatures)
    with pytest.raises(UnsupportedError, match=r"cutlass_fused_moe: .*'use_fused_finalize'"):
        FlashInferCutlassRunner(make_runner()[0]._weights, functions=fake.functions())
