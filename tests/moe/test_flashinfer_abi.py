# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer's versions take and return: the real signatures, and every broken answer."""

import inspect

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.flashinfer_abi import at_least, pair_dtype, version_key
from sgl_moe_jit.moe.runners.flashinfer_answer import holds_bfloat16_bits
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.runners.flashinfer_trtllm import FlashInferTrtllmRunner
from sgl_moe_jit.moe.topk import TopKFormat
from tests.moe.flashinfer_cases import (
    BF16,
    F32,
    FORMATS,
    ROUTERS,
    H,
    K,
    T,
    make_input,
    make_layer,
    make_logits,
    make_topk,
)
from tests.moe.flashinfer_fake import FakeFlashInfer, make_runner, mislabel
from tests.moe.flashinfer_signatures import FILES, every_version, installed, recorded

field_report = pytest.mark.field_report
formats = pytest.mark.parametrize("quantization", FORMATS, ids=str)


def test_the_fixture_and_the_installed_wheel_hold_every_function():
    names = {name for group in FILES.values() for name in group}
    assert {"0.6.15", "0.7.4"} <= set(recorded())
    for version, functions in every_version().items():
        assert set(functions) == names, version
        for name, signature in functions.items():
            if name.startswith("trtllm"):
                assert signature.parameters["do_finalize"].default is True, (version, name)


def test_the_installed_wheel_is_read_from_its_files():
    here = installed()
    if here is None:
        pytest.skip("needs the package flashinfer-python (without its dependencies)")
    version, functions = here
    assert at_least(version, "0.6.15")
    assert "routing_logits" in functions["trtllm_bf16_moe"].parameters


@formats
@pytest.mark.parametrize("version", every_version())
@field_report("F8")
def test_every_call_binds_to_the_real_signature(quantization, version):
    runner, _, fake = make_runner(quantization, version)
    x = make_input(quantization)
    for output in (make_topk(), make_logits(ROUTERS[2])):
        for defer in (True, False):
            runner.run(x, output, defer=defer)  # the fake binds each call
    assert len([name for name, _ in fake.calls if name.startswith("trtllm")]) == 4


def without(signature, name):
    kept = [p for p in signature.parameters.values() if p.name != name]
    return signature.replace(parameters=kept)


def with_new_required(signature):
    new = inspect.Parameter("must_have", inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=[*signature.parameters.values(), new])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: without(s, "do_finalize"), "unexpected keyword argument 'do_finalize'"),
        (lambda s: without(s, "gemm1_weights"), "unexpected keyword argument 'gemm1_weights'"),
        (with_new_required, "missing a required .*argument: 'must_have'"),
    ],
)
def test_a_changed_signature_is_refused_when_the_runner_is_made(change, why):
    signatures = dict(every_version()["0.7.4"])
    name = "trtllm_fp8_block_scale_moe"
    signatures[name] = change(signatures[name])
    fake = FakeFlashInfer("9.9.1", signatures)
    layer = make_layer(Quantization.FP8_BLOCK)
    with pytest.raises(UnsupportedError, match=f"flashinfer 9.9.1, {name}: does not take .*{why}"):
        FlashInferTrtllmRunner(layer.weights, functions=fake.functions())
    lacking = FlashInferFunctions("9.9.1", {})
    with pytest.raises(UnsupportedError, match=f"flashinfer 9.9.1: no function '{name}'; install"):
        FlashInferTrtllmRunner(layer.weights, functions=lacking)


@field_report("M3")
@formats
def test_a_version_below_the_floor_is_refused(quantization):
    fake = FakeFlashInfer("0.6.14")
    with pytest.raises(
        UnsupportedError,
        match=r"flashinfer 0\.6\.14: needs 0\.6\.15 or newer, .*#3595.*; "
        r"pip install -U 'flashinfer-python>=0\.6\.15'",
    ):
        FlashInferTrtllmRunner(make_layer(quantization).weights, functions=fake.functions())


@field_report("M3")
@formats
def test_deferral_is_declined_where_the_version_mislabels(quantization):
    fp4 = quantization in (Quantization.NVFP4, Quantization.MXFP4)
    x, logits = make_input(quantization), make_logits(ROUTERS[2])
    for version, is_right in [("0.6.15", fp4), ("0.6.15.post1", fp4), ("0.6.16", True)]:
        runner, _, fake = make_runner(quantization, version)
        assert runner.can_defer(TopKFormat.BYPASSED) == is_right
        assert runner.can_defer(TopKFormat.STANDARD)
        got = runner.run(x, logits, defer=True)
        assert isinstance(got, DeferredFinalizeOutput) == is_right
        assert fake.calls[-1][1]["do_finalize"] == (not is_right)
        plain = runner.run(x, logits, defer=False)
        assert torch.equal(got.finalize() if is_right else got, plain)


def bits_as_float32(answer):
    rows, weights, index = answer
    return [rows, mislabel(weights), index]


BREAKS = {
    "mislabelled": (
        bits_as_float32,
        rf"expert_weights: expected bfloat16 \[{T}, 3\], got float32 \[{T}, 3\] on cpu whose bits "
        r"are bfloat16 weights \(flashinfer#3595\)",
    ),
    "float32": (
        lambda a: [a[0], a[1].float(), a[2]],
        rf"expert_weights: expected bfloat16 \[{T}, 3\], got float32 \[{T}, 3\] on cpu; install",
    ),
    "flat weights": (
        lambda a: [a[0], a[1].flatten(), a[2]],
        rf"expert_weights: expected bfloat16 \[{T}, 3\], got bfloat16 \[15\] on cpu",
    ),
    "long index": (
        lambda a: [a[0], a[1], a[2].long()],
        r"expanded_idx_to_permuted_idx: expected int32 \[15\], got int64 \[15\] on cpu",
    ),
    "short index": (
        lambda a: [a[0], a[1], a[2][:-1]],
        r"expanded_idx_to_permuted_idx: expected int32 \[15\], got int32 \[14\] on cpu",
    ),
    "index out of bounds": (
        lambda a: [a[0], a[1], a[2].index_fill(0, torch.tensor(7), len(a[0]))],
        r"expanded_idx_to_permuted_idx: expected indices below the \d+ rows, got \d+ at slot 7",
    ),
    "padded hidden": (
        lambda a: [torch.nn.functional.pad(a[0], (0, 128)), a[1], a[2]],
        rf"gemm2_output: expected bfloat16 \[rows, {H}\], got bfloat16 \[\d+, 256\] on cpu",
    ),
    "narrow hidden": (
        lambda a: [a[0][:, :64], a[1], a[2]],
        rf"gemm2_output: expected bfloat16 \[rows, {H}\], got bfloat16 \[\d+, 64\] on cpu",
    ),
    "half rows": (
        lambda a: [a[0].half(), a[1], a[2]],
        rf"gemm2_output: expected bfloat16 \[rows, {H}\], got float16 \[\d+, {H}\] on cpu",
    ),
    "two tensors": (
        lambda a: a[:2],
        r"answer to do_finalize=False: expected \[gemm2_output, expert_weights, "
        r"expanded_idx_to_permuted_idx\], got 2 tensors",
    ),
    "four tensors": (lambda a: [*a, a[0]], r"answer to do_finalize=False: .*, got 4 tensors"),
    "one tensor": (lambda a: a[0], r"answer to do_finalize=False: .*, got bfloat16 \["),
    "None inside": (
        lambda a: [a[0], None, a[2]],
        r"expert_weights: expected a tensor, got NoneType",
    ),
    "elsewhere": (
        lambda a: [a[0].to("meta"), a[1], a[2]],
        r"gemm2_output: expected a tensor on cpu, got bfloat16 \[\d+, 128\] on meta",
    ),
}


@field_report("F8")
@field_report("M3")
@formats
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_answer_is_refused_by_name(quantization, name):
    spoil, why = BREAKS[name]
    runner, _, fake = make_runner(quantization, "0.7.4", spoil=spoil)
    with pytest.raises(UnsupportedError) as raised:
        runner.run(make_input(quantization), make_logits(ROUTERS[2]), defer=True)
    function = fake.calls[-1][0]
    raised.match(f"^flashinfer 0.7.4, {function}: {why}")
    raised.match(r"; install a flashinfer-python whose answers were checked, 0\.6\.15 to 0\.7\.4, "
                 "or let FlashInfer finish: pass defer=False$")  # fmt: skip
    runner.run(make_input(quantization), make_logits(ROUTERS[2]), defer=False)


@formats
def test_a_pair_must_come_back_in_its_own_dtype(quantization):
    def to_bfloat16(answer):
        return [answer[0], answer[1].to(BF16), answer[2]]

    runner, _, _ = make_runner(quantization, spoil=to_bfloat16)
    with pytest.raises(UnsupportedError, match=rf"expected float32 \[{T}, {K}\], got bfloat16"):
        runner.run(make_input(quantization), make_topk(), defer=True)


FINISHED = {
    "two": (lambda out: [out, out], "2 tensors"),
    "none": (lambda out: None, "NoneType"),
    "float32": (lambda out: out.float(), r"float32 \[5, 128\]"),
    "wide": (lambda out: out.repeat(1, 3), r"bfloat16 \[5, 384\]"),
    "short": (lambda out: out[:3], r"bfloat16 \[3, 128\]"),
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_broken_finished_output_is_refused(name):
    change, got = FINISHED[name]
    runner, _, fake = make_runner(Quantization.NONE)
    right = fake._trtllm
    fake._trtllm = lambda function, a: change(right(function, a))
    with pytest.raises(
        UnsupportedError,
        match=r"flashinfer 0\.7\.4, trtllm_bf16_routed_moe: output: "
        rf"expected bfloat16 \[5, 128\] on cpu, got {got}.*0\.7\.4$",
    ):
        runner.run(make_input(Quantization.NONE), make_topk(), defer=False)


def test_the_detector_knows_the_bits_of_the_report():
    """0.5 and 0.25 in bfloat16, 0x3f00 and 0x3e80, read as one float32."""
    first = torch.tensor([0.5, 0.25], dtype=BF16).view(F32)
    assert first.item() == pytest.approx(0.2504807, abs=1e-7)
    weights = torch.rand(4, 8).softmax(-1)
    wrong = mislabel(weights.to(BF16))
    assert wrong[0, 0] == weights.to(BF16).view(F32)[0, 0]
    assert holds_bfloat16_bits(wrong)
    assert not holds_bfloat16_bits(weights)  # true float32
    assert not holds_bfloat16_bits(weights.to(BF16).float())  # bfloat16 values, rightly labelled


def test_versions_compare_as_they_are_released():
    order = ["0.6.15.dev3", "0.6.15rc1", "0.6.15", "0.6.15.post1", "0.6.16", "0.7", "0.7.2.post1"]
    keys = [version_key(text) for text in order]
    assert keys == sorted(keys)
    assert version_key("0.7.0") == version_key("0.7")
    for wrong in ("unknown", "", "0.7.x"):
        with pytest.raises(UnsupportedError, match=f"expected a version .* got {wrong!r}"):
            version_key(wrong)
    # A source checkout says 0.0.0+unknown.
    assert not at_least("0.0.0+unknown", "0.6.15")


@field_report("U1")
def test_a_local_label_says_nothing():
    assert version_key("0.6.16+cu130") == version_key("0.6.16")
    assert at_least("0.6.16+cu130", "0.6.16")


def test_pairs_by_version_and_dtype():
    nvfp4, none = Quantization.NVFP4, Quantization.NONE
    assert pair_dtype("0.6.15", nvfp4, F32) == BF16
    assert pair_dtype("0.6.16", nvfp4, F32) == F32
    assert pair_dtype("0.6.16", nvfp4, torch.float16) == F32
    assert pair_dtype("0.6.16", nvfp4, BF16) == BF16
    assert pair_dtype("0.6.17", none, F32) is None
    assert pair_dtype("0.6.18", none, torch.float64) == F32
