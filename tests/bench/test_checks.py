# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Each subject's check takes what is right and refuses what is wrong; on a CPU, tiny."""

import dataclasses

import pytest
import torch

from sgl_moe_jit.bench import (
    layer,
    layer_cases,
    memory,
    norm,
    norm_peers,
    permute,
    route,
    stream,
    waterfill,
)
from sgl_moe_jit.bench.cases import CASES, FinalizeCase, make_finalize_inputs
from sgl_moe_jit.bench.checks import check_provider
from sgl_moe_jit.bench.contest import WrongResultError
from sgl_moe_jit.bench.norm_inputs import make_norm_inputs
from sgl_moe_jit.bench.peers import ours, torch_bmm, torch_compiled, torch_eager
from sgl_moe_jit.moe.routing import select_experts

# Padded; an odd top_k, so that two calls' indices would lie side by side without a gap.
CASE = FinalizeCase("tiny", 64, 128, 3, 8)


def finalize_inputs(num_tokens=5):
    return make_finalize_inputs(CASE, num_tokens, 3, device="cpu")


@pytest.mark.parametrize("provider", [ours, torch_eager, torch_bmm])
def test_finalize_providers_are_right(provider):
    for x in finalize_inputs():
        check_provider("it", provider(x, CASE.top_k), x, CASE.top_k)


@pytest.mark.slow
def test_a_compiled_finalize_is_right():
    inputs = finalize_inputs()
    for x, call in zip(inputs, torch_compiled(inputs, CASE.top_k), strict=True):
        check_provider("it", call, x, CASE.top_k)


def test_a_wrong_finalize_is_refused():
    x = finalize_inputs()[0]
    right = ours(x, CASE.top_k)
    with pytest.raises(WrongResultError, match=r"it: out: \d+ of 320 elements are wrong; the wors"):
        check_provider("it", lambda: (right(), x.out.sub_(x.shared_output)), x, CASE.top_k)
    with pytest.raises(WrongResultError, match=r"it: out: .*elements are wrong.*got nan"):
        check_provider("it", lambda: None, x, CASE.top_k)


def test_unwritten_rows_beyond_the_checked_ones_are_refused():
    x = finalize_inputs(100)[0]
    right = ours(x, CASE.top_k)
    with pytest.raises(WrongResultError, match="it: out: elements were left unwritten"):
        check_provider("it", lambda: (right(), x.out[99].fill_(float("nan"))), x, CASE.top_k)


def test_calls_have_rows_and_aligned_routing_of_their_own():
    inputs = finalize_inputs()
    rows = torch.cat([x.expanded_idx_to_permuted_idx.flatten() for x in inputs])
    assert sorted(rows.tolist()) == list(range(3 * 5 * 3))
    assert [x.first_row for x in inputs] == [0, 15, 30]
    for x in inputs:
        for routing in (x.expanded_idx_to_permuted_idx, x.expert_weights):
            assert routing.is_contiguous() and routing.storage_offset() * 4 % 256 == 0


def test_the_streaming_kernel_gets_planes_of_its_own():
    inputs = finalize_inputs()
    rows, shared, out = stream.planes(CASE, inputs[1])
    assert rows.numel() == 3 * 5 * 64 and shared.numel() == out.numel() == 5 * 64
    assert rows.data_ptr() == inputs[1].gemm2_out[15].data_ptr()
    for deep, threads, blocks in stream.launches(7168 * 4096, 132):
        assert threads * blocks * 8 <= 7168 * 4096 + 8 * threads
        assert 0 < threads <= 512 and deep in (True, False)


def norm_inputs():
    return make_norm_inputs(CASE, 5, 2, device="cpu")


def plain_add_rmsnorm(x, residual, weight, eps):
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float())


@pytest.mark.parametrize("name", ["ours", "ours in FP8", "torch", "two kernels"])
def test_norm_providers_are_right(name):
    provider = {
        "ours": lambda: norm_peers.each(norm_peers.ours),
        "ours in FP8": lambda: norm_peers.each(norm_peers.ours_fp8),
        "torch": lambda: norm_peers.in_torch(compiled=False),
        "two kernels": lambda: norm_peers.two_kernels(norm_peers.our_finalize, plain_add_rmsnorm),
    }[name]()
    inputs = norm_inputs()
    for x, call in zip(inputs, provider(inputs, CASE.top_k), strict=True):
        norm.check("it", call, x, CASE.top_k)


def test_a_norm_in_place_leaves_the_others_residual_alone():
    inputs = norm_inputs()
    before = [x.residual.clone() for x in inputs]
    provider = norm_peers.two_kernels(norm_peers.our_finalize, plain_add_rmsnorm)
    for call in provider(inputs, CASE.top_k):
        call.run()
    assert all(torch.equal(x.residual, b) for x, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("broken", ["residual_out", "out"])
def test_a_wrong_norm_is_refused(broken):
    x = norm_inputs()[0]
    (right,) = norm_peers.in_torch(compiled=False)([x], CASE.top_k)

    def run():
        right.run()
        getattr(right, broken).mul_(1.1)

    with pytest.raises(WrongResultError, match=f"it: {broken}: .* elements are wrong"):
        norm.check("it", dataclasses.replace(right, run=run), x, CASE.top_k)


def test_permutations_are_right_and_wrong_ones_refused():
    (x,) = permute.make_inputs(CASE, 6, 1, device="cpu")
    want = permute.routing(x, CASE.num_experts)
    for name, function in permute.permutations(CASE, 6).items():
        permute.check(name, function(x.hidden_states, x.topk_ids, CASE.num_experts), x, want)
    rows, row_of, ends = permute.torch_permute(x.hidden_states, x.topk_ids, CASE.num_experts)
    with pytest.raises(WrongResultError, match="it: row_of differs"):
        permute.check("it", (rows, row_of.flip(0), ends), x, want)
    with pytest.raises(WrongResultError, match="it: offsets differs"):
        permute.check("it", (rows, row_of, ends + 1), x, want)
    with pytest.raises(WrongResultError, match="it: rows of slot 0 differ"):
        permute.check("it", (rows + 1, row_of, ends), x, want)


def test_expansions_are_right_and_wrong_ones_refused():
    case = FinalizeCase("tiny", 64, 64, 3, 16)
    x = waterfill.make_inputs(case, 70, device="cpu")
    want = waterfill.right_answers(x, 16, 8)
    for name, entry in waterfill.entries(case, 70, None).items():
        got = entry.expand(x.topk_ids, x.topk_weights, 16, 8)
        waterfill.check(name, got, want[entry.mode])
    with pytest.raises(WrongResultError, match=r"it: \d+ of 280 ids differ"):
        waterfill.check("it", want["home"], want["exact"])
    with pytest.raises(WrongResultError, match="it: 280 of 280 weights differ"):
        waterfill.check("it", (want["home"][0], want["home"][1] + 1), want["home"])


@pytest.mark.parametrize("name", CASES)
def test_routing_is_right_and_wrong_routing_refused(name):
    x = route.make_inputs(CASES[name], 40, device="cpu")
    got = select_experts(x.logits, x.routing, x.bias)
    route.check("it", got, x)
    with pytest.raises(WrongResultError, match="it: other experts in 40 of 40 rows"):
        other = (got.topk_ids + 1) % x.routing.num_experts
        route.check("it", dataclasses.replace(got, topk_ids=other), x)
    with pytest.raises(WrongResultError, match=r"it: a weight is off by 0\.0"):
        route.check("it", dataclasses.replace(got, topk_weights=got.topk_weights * 1.02), x)


def test_a_path_is_offered_where_it_fits():
    big = permute.permutations(CASES["deepseek-v3"], 16384)
    assert list(big) == ["sgl_moe_jit", "sgl_moe_jit, four launches", "torch"]
    small = permute.permutations(CASES["deepseek-v3"], 1)
    assert "sgl_moe_jit, one launch" in small and "sgl_moe_jit, two launches" in small


@pytest.mark.parametrize("name", layer_cases.LAYERS)
@torch.no_grad()
def test_the_layer_is_right_and_a_wrong_one_refused(name):
    shape = dataclasses.replace(layer_cases.LAYERS[name].shape, hidden_dim=64, top_k=3)
    tiny = dataclasses.replace(layer_cases.LAYERS[name], shape=shape, local_experts=8, width=32)
    stock = layer_cases.make_stock(tiny, "cpu")
    block = layer_cases.load(stock)
    made = layer.contestants(stock, block, layer_cases.make_batch(tiny, 6, "cpu"))
    assert list(made) == [*layer.OURS, layer.STOCK, layer.GEMMS]
    for make in made.values():
        make().check()
    right = made["sgl_moe_jit"]()
    stock.experts.down_proj.mul_(1.5)  # what was worked out before stays
    with pytest.raises(WrongResultError, match=r"sgl_moe_jit: a row is off by .* of its norm"):
        right.check()


@torch.no_grad()
def test_the_orders_that_memory_compares_are_the_layer():
    shape = dataclasses.replace(CASES["deepseek-v3"], hidden_dim=64, top_k=3)
    tiny = dataclasses.replace(
        layer_cases.LAYERS["deepseek-v3"], shape=shape, local_experts=8, width=32
    )
    stock = layer_cases.make_stock(tiny, "cpu")
    block = layer_cases.load(stock)
    made = memory.contestants_by_order(stock, block, layer_cases.make_batch(tiny, 6, "cpu"))
    assert len(made) == 4
    for make in made.values():
        make().check()
