# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter to FlashInfer's trtllm functions, against a FlashInfer in plain torch."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import (
    DeferredFinalizeOutput,
    deferred_finalize_context,
    finalize_output,
)
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners import create_runner
from sgl_moe_jit.moe.topk import (
    PackedTopKOutput,
    StandardTopKOutput,
    TopKFormat,
)
from tests.moe.flashinfer_cases import (
    BF16,
    F32,
    FORMATS,
    ROUTERS,
    E,
    H,
    K,
    T,
    assert_right,
    make_input,
    make_logits,
    make_topk,
)
from tests.moe.flashinfer_fake import make_runner
from tests.moe.flashinfer_signatures import every_version
from tests.moe.runner_cases import oracle

field_report = pytest.mark.field_report
formats = pytest.mark.parametrize("quantization", FORMATS, ids=str)
VERSIONS = [*every_version(), "0.6.16"]
versions = pytest.mark.parametrize("version", VERSIONS)
NEW = "0.7.4"


@formats
@versions
@pytest.mark.parametrize(("weight_dtype", "factor"), [(F32, 2.5), (BF16, 1.0)])
@field_report("C7")
@field_report("M3")
def test_ids_and_weights(quantization, version, weight_dtype, factor):
    runner, layer, fake = make_runner(quantization, version)
    x, topk = make_input(quantization), make_topk(factor=factor, dtype=weight_dtype)
    deferred, finished = (runner.run(x, topk, defer=defer) for defer in (True, False))
    assert isinstance(deferred, DeferredFinalizeOutput) and isinstance(finished, torch.Tensor)
    assert deferred.hidden_dim == H and deferred.routed_scaling_factor == 1.0
    assert [a["do_finalize"] for n, a in fake.calls if "quantize" not in n] == [False, True]
    # The fake finishes by the same op: turning deferral off changes nothing.
    assert torch.equal(deferred.finalize(), finished)
    bf16 = deferred.expert_weights.dtype == BF16
    assert_right(finished, layer.plain, x, topk, bf16_weights=bf16)
    native = create_runner("native", layer.plain).run(x.float(), topk, defer=False)
    # the native runner keeps float32: the same bound, seen from there
    assert_right(
        finished.double() - native.double() + oracle(layer.plain, x, topk),
        layer.plain,
        x,
        topk,
        bf16_weights=bf16,
    )


@formats
def test_float32_weights_stay_so_where_the_version_reads_them(quantization):
    x, topk = make_input(quantization), make_topk()
    fp4 = quantization in (Quantization.NVFP4, Quantization.MXFP4)
    for version, is_float32 in [("0.6.15", False), ("0.6.16", fp4), ("0.6.18", True), (NEW, True)]:
        runner, _, _ = make_runner(quantization, version)
        output = runner.run(x, topk, defer=True)
        assert (output.expert_weights.dtype == F32) == is_float32, version


@formats
@pytest.mark.parametrize("version", ["0.6.15", NEW])
def test_packed_ids(quantization, version):
    runner, layer, _ = make_runner(quantization, version)
    x, topk = make_input(quantization), make_topk(dtype=BF16)
    topk = replace(topk, topk_ids=topk.topk_ids.clamp(-1, E))
    packed = PackedTopKOutput.pack(topk)
    deferred, finished = (runner.run(x, packed, defer=defer) for defer in (True, False))
    assert torch.equal(deferred.finalize(), finished)
    assert torch.equal(finished, runner.run(x, topk, defer=False))
    assert_right(finished, layer.plain, x, topk)
    scaled = replace(packed, routed_scaling_factor=2.0)
    assert_right(runner.run(x, scaled, defer=False), layer.plain, x, scaled.to_standard())


def test_weights_on_the_input():
    runner, layer, _ = make_runner(Quantization.NONE)
    x, ids = make_input(Quantization.NONE), torch.arange(T)[:, None] % E
    topk = StandardTopKOutput(torch.full((T, 1), 0.5), ids, weight_on_input=True)
    want = StandardTopKOutput(torch.ones(T, 1), ids)
    for output in (topk, PackedTopKOutput.pack(topk)):
        assert_right(runner.run(x, output, defer=False), layer.plain, x / 2, want)


@formats
@pytest.mark.parametrize("version", ["0.6.15", NEW])
def test_padding(quantization, version):
    runner, layer, fake = make_runner(quantization, version, padded_dim=256)
    x, topk = make_input(quantization), make_topk()
    asked = runner.run(x, topk, defer=True)
    can = quantization is not Quantization.NVFP4
    assert runner.can_defer(TopKFormat.STANDARD) == can
    assert isinstance(asked, DeferredFinalizeOutput) == can
    finished = runner.run(x, topk, defer=False)
    assert finished.shape == (T, H) and finished.is_contiguous()
    assert torch.equal(finalize_output(asked), finished)
    assert_right(finished, layer.plain, x, topk, bf16_weights=True)
    if can:
        assert asked.gemm2_out.shape[1] == 256 and asked.hidden_dim == H
    assert fake.calls[-1][1]["gemm1_weights"] is layer.weights.gemm1_weights  # no copy


@formats
@pytest.mark.parametrize("format_", ["standard", "packed", "bypassed"])
@pytest.mark.parametrize("defer", [True, False])
@field_report("M6")
def test_no_tokens_call_nothing(quantization, format_, defer):
    runner, _, fake = make_runner(quantization)
    standard = make_topk(0)
    output = {
        "standard": standard,
        "packed": PackedTopKOutput.pack(standard),
        "bypassed": make_logits(ROUTERS[2], 0),
    }[format_]
    got = runner.run(make_input(quantization, 0), output, defer=defer)
    assert isinstance(got, DeferredFinalizeOutput) == defer
    finished = finalize_output(got)
    assert finished.shape == (0, H) and finished.dtype == BF16
    assert not fake.calls


@field_report("M15")
@formats
def test_switches_rule_out_deferral_and_pdl_with_the_same_bits(quantization, monkeypatch):
    runner, _, fake = make_runner(quantization)
    x, topk = make_input(quantization), make_topk()
    with deferred_finalize_context():
        want = runner.run(x, topk).finalize()
        assert "enable_pdl" not in fake.calls[-1][1]
        monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
        assert torch.equal(runner.run(x, topk).finalize(), want)
        assert fake.calls[-1][1]["enable_pdl"] is False
        monkeypatch.setenv("SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE", "0")
        off = runner.run(x, topk)
    assert isinstance(off, torch.Tensor) and torch.equal(off, want)


@formats
def test_the_input_is_left_alone_and_nothing_is_copied(quantization):
    runner, layer, fake = make_runner(quantization)
    assert runner.mutates_input is False
    x, topk = make_input(quantization), make_topk()
    before = x.clone()
    runner.run(x, topk, defer=False)
    assert torch.equal(x, before)
    arguments = fake.calls[-1][1]
    for name, tensor in layer.weights.tensors():
        if name in arguments:
            assert arguments[name] is tensor
    strided = torch.randn(H, T).t().to(BF16)
    assert not strided.is_contiguous()
    assert torch.equal(
        runner.run(strided, topk, defer=False), runner.run(strided.contiguous(), topk, defer=False)
    )


def test_top_k_beyond_the_fused_op_is_finished_by_flashinfer():
    """65 slots a token: more than the op takes, so a request to defer is declined."""
    runner, _, fake = make_runner(Quantization.NONE, spoil=lambda answer: pytest.fail("deferred"))
    ids = torch.full((1, 65), -1)
    with pytest.raises(ValueError, match="top_k"):  # the fake finishes by our op, which refuses
        runner.run(
            make_input(Quantization.NONE, 1), StandardTopKOutput(torch.ones(1, 65), ids), defer=True
        )
    assert fake.calls[-1][1]["do_finalize"] is True


def test_wrong_inputs_are_named():
    runner, _, fake = make_runner(Quantization.NONE)
    x, topk = make_input(Quantization.NONE), make_topk()
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16, got float32; .*\.to\("):
        runner.run(x.float(), topk)
    with pytest.raises(
        ValueError, match=r"hidden_states: expected \[num_tokens, 128\], got \(5, 8"
    ):
        runner.run(x[:, :8], topk)
    with pytest.raises(ValueError, match="hidden_states: expected cpu like the weights, got meta"):
        runner.run(x.to("meta"), topk)
    with pytest.raises(ValueError, match=r"topk_ids: expected \[2, top_k\]"):
        runner.run(x[:2], topk)
    with pytest.raises(ValueError, match=r"router_logits: expected \[2, \.\.\.\], got \(5, 16\)"):
        runner.run(x[:2], make_logits(ROUTERS[6]))
    with pytest.raises(ValueError, match=r"packed_ids: expected \[2, \.\.\.\], got \(5, 2\)"):
        runner.run(x[:2], PackedTopKOutput.pack(topk))
    small, _, _ = make_runner(Quantization.NONE, local_expert_offset=14)
    with pytest.raises(ValueError, match="router_logits: expected 18 experts or more, for 4 here"):
        small.run(x, make_logits(ROUTERS[6]))
    for asks in (x.clone().requires_grad_(), x):
        weights = topk.topk_weights.clone().requires_grad_(asks is x)
        with pytest.raises(UnsupportedError, match=r"gradient: .* under torch"):
            runner.run(asks, StandardTopKOutput(weights, topk.topk_ids))
        with torch.no_grad():
            runner.run(asks, StandardTopKOutput(weights, topk.topk_ids))
    assert K == 2 and fake.calls
