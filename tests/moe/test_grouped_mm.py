# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What is grouped_mm's own: unwritten rows, autocast, torch.compile, limits, the activation."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, finalize_output
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners import create_runner, grouped_mm, select_runner
from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKFormat
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    F32,
    assert_close,
    make_input,
    make_topk,
    make_weights,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN: torch.empty's, and the rows torch's grouped_mm leaves unwritten."""
    empty, multiply = torch.empty, torch.nn.functional.grouped_mm

    def nan_empty(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(-(2**30))

    class Poison(torch.autograd.Function):
        """NaN in unwritten rows, of the output and of the gradient."""

        @staticmethod
        def forward(ctx, x, end):
            ctx.end = end
            x = x.clone()
            x[end:] = float("nan")
            return x

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            grad[ctx.end :] = float("nan")
            return grad, None

    def nan_multiply(x, weight, *, offs):
        end = int(offs[-1])
        return Poison.apply(multiply(Poison.apply(x, end), weight, offs=offs), end)

    monkeypatch.setattr(torch, "empty", nan_empty)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", nan_multiply)


@on_devices
@field_report("M4")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("own_activation", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_unwritten_rows_reach_neither_output_nor_gradient(
    device, bias, own_activation, dtype, request
):
    def run():
        weights = make_weights(dtype=dtype, bias=bias, norm=bias, device=device)
        weights = replace(weights, is_silu_and_mul=not own_activation)
        x = make_input(9, dtype=dtype, device=device)
        topk = make_topk(9, absent=0.5, device=device)
        assert int((topk.topk_ids == 6).sum()) > 0
        leaves = [x, weights.up, weights.down]
        if bias:
            leaves += [weights.up_bias, weights.down_bias, weights.post_expert_norm.weight]
        for leaf in leaves:
            leaf.requires_grad_()
        out = create_runner("grouped_mm", weights).run(x, topk, defer=False)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    clean = run()
    request.getfixturevalue("poisoned")
    poisoned = run()
    for a, b in zip(clean, poisoned, strict=True):
        assert b.isfinite().all() and torch.equal(a, b)


@on_devices
@field_report("M4")
def test_unwritten_rows_in_a_deferred_output(device, poisoned):
    weights, x = make_weights(device=device), make_input(9, device=device)
    topk = make_topk(9, absent=0.5, device=device)
    output = create_runner("grouped_mm", weights).run(x, topk, defer=True)
    assert isinstance(output, DeferredFinalizeOutput)
    assert output.gemm2_out[-1].isnan().all(), "the poison is gone: this test shows nothing"
    assert_close(output.finalize(), weights, x, topk, None)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_same_function_with_and_without_the_fused_activation(dtype):
    weights, x, topk = make_weights(dtype=dtype), make_input(9, dtype=dtype), make_topk(9)
    calls = []

    def activation(rows):
        calls.append(rows.shape)
        return make_weights().activation(rows)

    weights = replace(weights, activation=activation)
    fused = grouped_mm.GroupedMMRunner(weights).run(x, topk, defer=False)
    assert not calls
    plain = grouped_mm.GroupedMMRunner(weights, fused_activation=False)
    assert_close(fused, weights, x, topk, None)
    assert_close(plain.run(x, topk, defer=False), weights, x, topk, None)
    assert calls
    unknown = grouped_mm.GroupedMMRunner(replace(weights, is_silu_and_mul=False))
    calls.clear()
    unknown.run(x, topk, defer=False)
    assert calls, "an activation that is not declared to be silu_and_mul must be called"


@on_devices
def test_autocast_casts_the_input(device):
    weights = make_weights(dtype=BF16, bias=True, norm=True, device=device)
    x, topk = make_input(9, device=device), make_topk(9, device=device)
    runner = create_runner("grouped_mm", weights)
    with pytest.raises(TypeError, match=r"hidden_states: expected bfloat16 .* got float32"):
        runner.run(x, topk, defer=False)
    with torch.autocast(device, dtype=BF16):
        got = runner.run(x, topk, defer=False)
        deferred = finalize_output(runner.run(x, topk, defer=True))
    assert got.dtype == BF16 and torch.equal(got, deferred)
    assert_close(got, weights, x.to(BF16), topk, None)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("bias", [True, False])
def test_compile_fullgraph_with_gradients(dtype, bias):
    torch._dynamo.reset()
    weights = make_weights(dtype=dtype, bias=bias, norm=bias)
    runner = create_runner("grouped_mm", weights)
    weights.up.requires_grad_()
    weights.down.requires_grad_()

    def layer(x, ids, w):
        return runner.run(x, StandardTopKOutput(w, ids, 2.5), defer=True).finalize(x)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (5, 9, 0):
        x, topk = make_input(num_tokens, dtype=dtype), make_topk(num_tokens)
        args = (x.requires_grad_(), topk.topk_ids, topk.topk_weights.requires_grad_())
        leaves = [x, topk.topk_weights, weights.up, weights.down]
        got, want = compiled(*args), layer(*args)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        grads = [torch.autograd.grad(y.float().square().sum(), leaves) for y in (got, want)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7 if dtype == BF16 else 1e-5, atol=1e-4)


def test_compile_without_naming_defer_says_what_to_do():
    torch._dynamo.reset()
    runner, x, topk = create_runner("grouped_mm", make_weights()), make_input(4), make_topk(4)
    assert runner.run(x, topk).shape == x.shape
    with pytest.raises(Exception, match="defer: pass True or False in compiled code"):
        torch.compile(lambda x: runner.run(x, topk), fullgraph=True, backend="eager")(x)


def test_grouped_mm_op():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.sgl_moe_jit.grouped_mm.default, (x, weight, offsets))
    out = torch.ops.sgl_moe_jit.grouped_mm(x, weight, offsets)
    got = torch.autograd.grad(out.sum(), (x, weight))
    parts = [x[:2] @ weight[0], x[2:] @ weight[2]]
    want = torch.autograd.grad(torch.cat(parts).sum(), (x, weight))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_too_many_slots_are_refused():
    weights = make_weights(num_experts=2, hidden=4, width=4)
    x = torch.zeros(1, 4).expand(2**28, 4)
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)
    topk = StandardTopKOutput(torch.zeros(1, 1).expand(2**28, 8), ids)
    with pytest.raises(ValueError, match=r"topk_ids: expected num_tokens \* top_k below 2\^31"):
        create_runner("grouped_mm", weights).run(x, topk, defer=False)


def config_of(**changes):
    return replace(RunnerConfig.of(make_weights(dtype=BF16)), **changes)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (config_of(aligned_16_bytes=False), "multiples of 16 bytes"),
        (config_of(hidden_dim=4), "hidden_dim 4"),
        (config_of(num_experts=1024, device=torch.device("cuda", 0)), "at most 1023, got 1024"),
    ],
)
def test_limits_are_reasons(config, why):
    support = grouped_mm.supports(config)
    assert not support.ok and why in support.why


def test_an_old_gpu_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    support = grouped_mm.supports(config_of(device=torch.device("cuda", 0)))
    assert support.why == "device: needs compute capability 8.0 or newer, got 7.5"


def test_an_old_torch_is_a_reason(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert "needs 2.10" in grouped_mm.supports(config_of()).why
    with pytest.raises(UnsupportedError, match=r"needs 2\.10"):
        create_runner("grouped_mm", make_weights())


def test_which_formats_it_defers():
    runner = create_runner("grouped_mm", make_weights())
    assert runner.name == "grouped_mm" and not runner.mutates_input
    assert all(runner.can_defer(topk_format) for topk_format in TopKFormat)


def test_a_misaligned_view_of_the_weights_goes_to_native():
    weights = make_weights()
    storage = torch.empty(weights.up.numel() + 1)
    moved = replace(weights, up=storage[1:].view(weights.up.shape).copy_(weights.up))
    assert select_runner("auto", RunnerConfig.of(weights)).entry.name == "grouped_mm"
    selection = select_runner("auto", RunnerConfig.of(moved))
    assert selection.entry.name == "native"
    assert selection.refused[0][0] == "grouped_mm" and "16 bytes" in selection.refused[0][1]
