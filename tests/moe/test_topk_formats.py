# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The three formats of a router's output, and the runners that take any of them."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.deferred import finalize_output
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts, zero_expert_output
from sgl_moe_jit.moe.runners import create_runner
from sgl_moe_jit.moe.topk import (
    BypassedTopKOutput,
    PackedTopKOutput,
    StandardTopKOutput,
    TopKFormat,
)
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    NUM_EXPERTS,
    RUNNERS,
    TOP_K,
    assert_close,
    make_input,
    make_topk,
    make_weights,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
runners = pytest.mark.parametrize("name", RUNNERS)
ROUTING = RouterConfig(
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    score_function="sigmoid",
    has_correction_bias=True,
    renormalize=True,
    routed_scaling_factor=2.5,
)


def bypassed(num_tokens, device, routing=ROUTING, **others):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(num_tokens, routing.num_experts, generator=generator).to(device)
    bias = torch.linspace(-0.1, 0.1, routing.num_experts, device=device)
    return BypassedTopKOutput(
        logits, routing, bias if routing.has_correction_bias else None, **others
    )


def of_bits(value):
    return torch.tensor([value], dtype=torch.int32).view(torch.float32).item()


@on_devices
def test_packed_holds_the_id_above_the_weights_bfloat16(device):
    ids = torch.tensor([[0, 1, 767], [-1, 32767, -32768]], device=device)
    weights = torch.tensor([[0.5, 1.0, -2.0], [0.25, 3.0, 0.0]], device=device)
    packed = PackedTopKOutput.pack(StandardTopKOutput(weights, ids, 2.5))
    assert packed.format is TopKFormat.PACKED and packed.routed_scaling_factor == 2.5
    expected = [[0x3F00, 0x13F80, 0x2FFC000], [-65536 + 0x3E80, 0x7FFF4040, -(2**31)]]
    assert packed.packed_ids.tolist() == expected
    back = packed.to_standard()
    assert back.format is TopKFormat.STANDARD and back.routed_scaling_factor == 2.5
    assert back.topk_ids.dtype == torch.int32 and torch.equal(back.topk_ids, ids.int())
    assert back.topk_weights.dtype == BF16 and torch.equal(back.topk_weights, weights.to(BF16))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_packed_weights_round_once_to_nearest_even(device, dtype):
    weights = torch.rand(500, 7, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    weights[0] = torch.tensor(
        [of_bits(0x3F808000), of_bits(0x3F818000), 1e-40, 0.0, float("inf"), float("nan"), -0.0]
    ).to(device, dtype)
    ids = torch.arange(3500, device=device).view(500, 7) % 768 - 1
    packed = PackedTopKOutput.pack(StandardTopKOutput(weights, ids)).to_standard()
    torch.testing.assert_close(
        packed.topk_weights, weights.to(BF16), rtol=0, atol=0, equal_nan=True
    )
    assert torch.equal(packed.topk_ids, ids.int())


def test_what_cannot_be_packed():
    weights = torch.rand(2, 3, requires_grad=True)
    topk = StandardTopKOutput(weights, torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="topk_weights: expected no gradient"):
        PackedTopKOutput.pack(topk)
    with torch.no_grad():
        PackedTopKOutput.pack(topk)
    with pytest.raises(TypeError, match=r"packed_ids: expected int32, got torch\.int64"):
        PackedTopKOutput(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="routed_scaling_factor: expected a float, got Tensor"):
        PackedTopKOutput(torch.zeros(2, 3, dtype=torch.int32), torch.ones(()))


@on_devices
def test_bypassed_routes_as_select_experts_does(device):
    count = torch.tensor(6, device=device)
    output = bypassed(9, device, num_token_non_padded=count)
    assert output.format is TopKFormat.BYPASSED
    expected = select_experts(
        output.router_logits, ROUTING, output.correction_bias, num_token_non_padded=count
    )
    got = output.to_standard()
    assert torch.equal(got.topk_ids, expected.topk_ids) and bool((got.topk_ids[6:] == -1).all())
    assert torch.equal(got.topk_weights, expected.topk_weights)


@on_devices
@runners
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("scale_in_weights", [True, False])
def test_runners_take_every_format(device, name, defer, scale_in_weights):
    weights, x = make_weights(device=device), make_input(12, device=device)
    routing = replace(ROUTING, scale_in_weights=scale_in_weights)
    output = bypassed(12, device, routing, num_token_non_padded=torch.tensor(10, device=device))
    standard = output.to_standard()
    assert standard.routed_scaling_factor == (1.0 if scale_in_weights else 2.5)
    runner = create_runner(name, weights)
    assert all(runner.can_defer(topk_format) for topk_format in TopKFormat)
    expected = finalize_output(runner.run(x, standard, defer=defer))
    got = finalize_output(runner.run(x, output, defer=defer))
    # The factor once, whoever owns it.
    assert torch.equal(got, expected)
    assert_close(got, weights, x, standard, None)
    packed = PackedTopKOutput.pack(standard)
    got = finalize_output(runner.run(x, packed, defer=defer))
    assert_close(got, weights, x, packed.to_standard(), None)


@runners
def test_anything_else_is_refused_by_name(name):
    runner, x = create_runner(name, make_weights()), make_input(2)
    with pytest.raises(TypeError, match=r"topk_output: expected a Standard.* got tuple"):
        runner.run(x, (None, None), defer=False)


def first_half(x):
    return x.chunk(2, dim=-1)[0]


# With linear experts weighing the input is weighing the output; with SiLU it is not.
@on_devices
@runners
@field_report("A10")
@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize("defer", [True, False])
def test_a_weight_on_the_input_is_applied_once(device, name, is_linear, defer):
    weights = make_weights(device=device)
    if is_linear:
        weights = replace(weights, activation=first_half, is_silu_and_mul=False)
    x, ids = make_input(9, device=device), make_topk(9, device=device).topk_ids[:, :1]
    w = torch.linspace(0.2, 0.9, 9, device=device)[:, None]
    before, runner = x.clone(), create_runner(name, weights)
    topk = StandardTopKOutput(w, ids, weight_on_input=True)
    got = finalize_output(runner.run(x, topk, defer=defer))
    assert torch.equal(x, before)
    ones = StandardTopKOutput(torch.ones_like(w), ids)
    assert_close(got, weights, x * w, ones, None)
    on_output = finalize_output(runner.run(x, StandardTopKOutput(w, ids), defer=defer))
    assert torch.allclose(got, on_output, atol=1e-5) == is_linear
    packed = finalize_output(runner.run(x, PackedTopKOutput.pack(topk), defer=defer))
    assert_close(packed, weights, x * w.to(BF16), ones, None)


@field_report("A10")
def test_weights_on_the_input_need_one_expert_a_token():
    with pytest.raises(ValueError, match="top_k: expected 1, since weight_on_input"):
        RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", weight_on_input=True)
    with pytest.raises(ValueError, match="topk_ids: expected one expert a token"):
        StandardTopKOutput(torch.ones(3, 2), torch.zeros(3, 2).int(), weight_on_input=True)


# 0, 3 and all 4 of a token's experts are zero experts; 6150 is no multiple of a vector.
@on_devices
@runners
@field_report("A9")
@pytest.mark.parametrize("hidden", [6144, 6150])
@pytest.mark.parametrize("factor", [1.0, 6.0])
def test_zero_experts_give_the_token_back_weighted(device, name, hidden, factor):
    if name == "grouped_mm" and hidden == 6150:
        name = "auto"  # rows of 6150 floats are not aligned for it
    weights = make_weights(num_experts=4, hidden=hidden, width=8, device=device)
    x = make_input(3, hidden, device=device)
    ids = torch.tensor([[0, 1, 2, 3], [9, 2, 4, 7], [8, 5, 4, 11]], device=device)
    w = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.25, 0.125, 1.0], [1.0, 2.0, 3.0, 4.0]])
    topk = StandardTopKOutput(w.to(device), ids, factor)
    identity = zero_expert_output(x, topk, num_experts=4)
    expected = x.double() * torch.tensor([[0.0], [1.625], [10.0]], device=device) * factor
    torch.testing.assert_close(identity.double(), expected, rtol=2**-22, atol=0)
    routed = create_runner(name, weights).run(x, topk, defer=True)
    assert_close(finalize_output(routed, identity), weights, x, topk, identity)
    alone = create_runner(name, weights).run(
        x[2:], StandardTopKOutput(topk.topk_weights[2:], ids[2:]), defer=False
    )
    assert not alone.any()  # only zero experts: no GEMM row


@runners
@field_report("A9")
def test_id_0_with_weight_0_is_no_expert(name):
    weights, x = make_weights(), make_input(4)
    ids, w = torch.tensor([[1, 2, 3]] * 4), torch.rand(4, 3)
    ids[:, 1] = -1
    masked = create_runner(name, weights).run(x, StandardTopKOutput(w, ids), defer=False)
    ids, w = ids.clone(), w.clone()
    ids[:, 1], w[:, 1] = 0, 0.0
    weighed = create_runner(name, weights).run(x, StandardTopKOutput(w, ids), defer=False)
    assert torch.equal(masked, weighed)


def test_zero_experts_leave_rows_without_them_alone():
    x = torch.full((2, 4), float("nan"))
    topk = StandardTopKOutput(torch.ones(2, 1), torch.tensor([[0], [-1]]))
    assert not zero_expert_output(x, topk, num_experts=4).any()
