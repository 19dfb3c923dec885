# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every runner against one float64 reference: deferral, shared expert, factor, layouts, padding."""

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import (
    DeferredFinalizeOutput,
    deferred_finalize_context,
    finalize_output,
)
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners import create_runner, runner_names, select_runner
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    F32,
    RUNNERS,
    assert_close,
    make_input,
    make_topk,
    make_weights,
    oracle,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
runners = pytest.mark.parametrize("name", RUNNERS)


@on_devices
@runners
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [BF16, F32])
@field_report("C6")
@field_report("C7")
def test_one_reference_for_every_way(device, name, asked, has_shared, factor, dtype):
    weights = make_weights(dtype=dtype, device=device)
    x, topk = (
        make_input(16, dtype=dtype, device=device),
        make_topk(16, factor=factor, device=device),
    )
    # 1e3: a shared row added twice, or not at all, cannot be missed
    shared = torch.full_like(x, 1e3) if has_shared else None
    with deferred_finalize_context(enabled=asked):
        routed = create_runner(name, weights).run(x, topk)
    assert isinstance(routed, DeferredFinalizeOutput) == asked
    got = finalize_output(routed, shared)
    assert got.dtype == dtype
    assert_close(got, weights, x, topk, shared)


@on_devices
@field_report("C6")
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_grouped_mm_deferred_and_finished_are_the_same_bits(device, dtype):
    weights = make_weights(dtype=dtype, device=device)
    x, topk = make_input(16, dtype=dtype, device=device), make_topk(16, factor=2.5, device=device)
    runner = create_runner("grouped_mm", weights)
    assert torch.equal(runner.run(x, topk, defer=True).finalize(), runner.run(x, topk, defer=False))


@on_devices
@runners
@field_report("M3")
@pytest.mark.parametrize("weight_dtype", [BF16, F32, torch.float16, torch.float64])
@pytest.mark.parametrize("defer", [True, False])
def test_weight_dtypes_are_read_as_what_they_are(device, name, weight_dtype, defer):
    weights, x = make_weights(device=device), make_input(8, device=device)
    topk = make_topk(8, device=device)
    # far from sum 1, and exact in every dtype here
    scaled = (topk.topk_weights * 64).round() + 1
    topk = StandardTopKOutput(scaled.to(weight_dtype), topk.topk_ids)
    got = finalize_output(create_runner(name, weights).run(x, topk, defer=defer))
    assert_close(got, weights, x, topk, None)


@runners
def test_wrong_kinds_are_refused(name):
    runner, x, topk = create_runner(name, make_weights()), make_input(4), make_topk(4)
    with pytest.raises(TypeError, match="topk_weights: expected a floating dtype"):
        runner.run(x, StandardTopKOutput(topk.topk_weights.int(), topk.topk_ids))
    with pytest.raises(TypeError, match="topk_ids: expected int32 or int64"):
        runner.run(x, StandardTopKOutput(topk.topk_weights, topk.topk_ids.to(torch.int16)))
    with pytest.raises(ValueError, match="hidden_states: expected"):
        runner.run(x[:, :8], topk)
    with pytest.raises(ValueError, match=r"topk_ids: expected \[3, top_k\]"):
        runner.run(x[:3], topk)


@on_devices
@runners
@field_report("M6")
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
def test_zero_tokens(device, name, defer, has_shared):
    weights, x, topk = (
        make_weights(device=device),
        make_input(0, device=device),
        make_topk(0, device=device),
    )
    shared = x.clone() if has_shared else None
    got = finalize_output(create_runner(name, weights).run(x, topk, defer=defer), shared)
    assert got.shape == (0, 32)
    assert got.dtype == x.dtype and torch.zeros(1, device=device).item() == 0


@on_devices
@runners
@pytest.mark.parametrize("absent_id", [-1, 6, 2**30])  # 6: num_experts, the sentinel of the field
@pytest.mark.parametrize("defer", [True, False])
def test_no_expert_at_all_is_exactly_the_shared_row(device, name, absent_id, defer):
    weights, x, topk = (
        make_weights(device=device),
        make_input(5, device=device),
        make_topk(5, device=device),
    )
    topk = StandardTopKOutput(topk.topk_weights, torch.full_like(topk.topk_ids, absent_id))
    routed = create_runner(name, weights).run(x, topk, defer=defer)
    assert torch.equal(finalize_output(routed, x), x)
    assert torch.equal(finalize_output(routed), torch.zeros_like(x))


@on_devices
@runners
@field_report("M16")
@pytest.mark.parametrize("defer", [True, False])
def test_padded_rows_neither_see_nor_touch_anything(device, name, defer):
    weights, x, topk = (
        make_weights(device=device),
        make_input(8, device=device),
        make_topk(8, device=device),
    )
    shared = make_input(8, seed=5, device=device)
    ids, w = topk.topk_ids.clone(), topk.topk_weights.clone()
    ids[5:], w[5:] = -1, float("nan")
    x[5:] = float("nan")
    runner = create_runner(name, weights)
    padded = finalize_output(runner.run(x, StandardTopKOutput(w, ids), defer=defer), shared)
    alone = runner.run(x[:5], StandardTopKOutput(w[:5], ids[:5]), defer=defer)
    assert torch.equal(padded[:5], finalize_output(alone, shared[:5]))
    assert torch.equal(padded[5:], shared[5:])


# Shapes from which the layout cannot be told: 2 I == H, and I == H.
@on_devices
@runners
@field_report("A12")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (64, 64)])
def test_layout_comes_from_the_flags(device, name, is_transposed, is_concatenated, hidden, width):
    weights = make_weights(
        hidden=hidden,
        width=width,
        is_transposed=is_transposed,
        interleaved=not is_concatenated,
        device=device,
    )
    x, topk = make_input(9, hidden, device=device), make_topk(9, device=device)
    assert_close(create_runner(name, weights).run(x, topk, defer=False), weights, x, topk, None)


@on_devices
@runners
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_biases_norms_and_no_gate(device, name, has_gate, bias, norm):
    weights = make_weights(has_gate=has_gate, bias=bias, norm=norm, device=device)
    x, topk = make_input(9, device=device), make_topk(9, absent=0.4, device=device)
    assert_close(create_runner(name, weights).run(x, topk, defer=False), weights, x, topk, None)


@on_devices
@runners
@field_report("A17")
@pytest.mark.parametrize("leaves", ["x", "router", "experts", "all"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("defer", [True, False])
def test_gradients_equal_the_float64_oracles(device, name, leaves, bias, defer):
    weights = make_weights(bias=bias, norm=bias, device=device)
    x, topk = make_input(9, device=device), make_topk(9, factor=2.5, absent=0.3, device=device)
    tensors = {"x": x, "router": topk.topk_weights, "up": weights.up, "down": weights.down}
    if bias:
        tensors |= {"up_bias": weights.up_bias, "down_bias": weights.down_bias}
        tensors |= {"norm": weights.post_expert_norm.weight}
    chosen = {
        "x": ["x"],
        "router": ["router"],
        "experts": [n for n in tensors if n not in ("x", "router")],
        "all": list(tensors),
    }[leaves]
    wanted = [tensors[n].requires_grad_() for n in chosen]
    seed = torch.randn(x.shape, device=device)
    out = finalize_output(create_runner(name, weights).run(x, topk, defer=defer))
    got = torch.autograd.grad((out * seed).sum(), wanted)
    want = torch.autograd.grad((oracle(weights, x, topk) * seed).sum(), wanted)
    for which, a, b in zip(chosen, got, want, strict=True):
        # float32 sums of at most 64 products three deep, relative to the largest gradient
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()), msg=lambda m, w=which: f"{w}: {m}"
        )


@on_devices
@runners
@field_report("A17")
@pytest.mark.parametrize("bias", [True, False])
def test_no_tokens_still_give_zero_gradients(device, name, bias):
    weights = make_weights(bias=bias, norm=bias, device=device)
    x, topk = make_input(0, device=device), make_topk(0, device=device)
    leaves = [x, weights.up, weights.down]
    if bias:
        leaves += [weights.up_bias, weights.down_bias]
    for leaf in leaves:
        leaf.requires_grad_()
    output = create_runner(name, weights).run(x, topk, defer=True)
    for out in (output.finalize(), output.gemm2_out):
        grads = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        for grad, leaf in zip(grads, leaves, strict=True):
            assert grad.shape == leaf.shape and not grad.any()


def test_registry_and_auto():
    assert {"native", "grouped_mm"} <= set(runner_names())
    assert select_runner("auto", RunnerConfig.of(make_weights())).entry.name == "grouped_mm"
    with pytest.raises(ValueError, match="runner: expected one of auto, "):
        create_runner("cutlass", make_weights())


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (make_weights(hidden=30), "strides: .* got hidden_dim 30, intermediate_dim 16 in float32"),
        (make_weights(width=15), "strides: .* hidden_dim 32, intermediate_dim 15"),
        (make_weights(hidden=30, is_transposed=True), "strides: .* hidden_dim 30"),
        (make_weights(width=12, dtype=BF16), "strides: .* intermediate_dim 12 in bfloat16"),
        (make_weights(dtype=torch.float64), "dtype: needs bfloat16 or float32, got float64"),
        (make_weights(dtype=torch.float16), "dtype: needs bfloat16 or float32, got float16"),
        (make_weights(num_experts=4097, hidden=4, width=4), "num_experts: at most 4096, got 4097"),
        (make_weights(device="meta"), "device: needs cpu or cuda, got meta"),
    ],
)
def test_auto_takes_native_and_says_why(weights, why):
    selection = select_runner("auto", RunnerConfig.of(weights))
    assert selection.entry.name == "native"
    ((refused, reason),) = selection.refused
    assert refused == "grouped_mm"
    with pytest.raises(UnsupportedError, match=why) as raised:
        create_runner("grouped_mm", weights)
    assert reason in str(raised.value)


def test_native_serves_what_grouped_mm_cannot():
    weights, x, topk = make_weights(hidden=30, width=15), make_input(6, 30), make_topk(6)
    assert_close(create_runner("auto", weights).run(x, topk, defer=False), weights, x, topk, None)


@on_devices
@runners
@pytest.mark.parametrize("top_k", [0, 65])
def test_a_top_k_the_fused_op_does_not_take_is_finished_by_the_runner(device, name, top_k):
    weights = make_weights(device=device)
    x = make_input(3, device=device)
    ids = torch.arange(3 * top_k, device=device).reshape(3, top_k) % weights.num_experts
    topk = StandardTopKOutput(torch.full((3, top_k), 1 / 64, device=device), ids, 2.5)
    got = create_runner(name, weights).run(x, topk, defer=True)
    assert_close(got, weights, x, topk, None)
