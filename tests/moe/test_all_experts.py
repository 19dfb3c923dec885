# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Few tokens through all experts: the same layer, and taken only where it pays."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.deferred import finalize_output
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.moe.runners import all_experts, create_runner, grouped_mm
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    F32,
    NUM_EXPERTS,
    TOP_K,
    assert_close,
    make_input,
    make_topk,
    make_weights,
)

on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def taken(monkeypatch):
    """Every call goes this way; the list grows with each."""
    calls, real = [], all_experts.expert_rows

    def recorded(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(grouped_mm.all_experts, "serves", lambda *_: True)
    monkeypatch.setattr(grouped_mm.all_experts, "expert_rows", recorded)
    return calls


@on_devices
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("own_activation", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
@torch.no_grad()
def test_it_is_the_layer(device, is_transposed, own_activation, bias, dtype, taken):
    weights = make_weights(
        dtype=dtype, device=device, bias=bias, norm=bias, is_transposed=is_transposed
    )
    weights = replace(weights, is_silu_and_mul=not own_activation)
    x = make_input(9, dtype=dtype, device=device)
    topk = make_topk(9, absent=0.5, device=device)
    runner = create_runner("grouped_mm", weights)
    finished, rows = runner.run(x, topk, defer=False), runner.run(x, topk, defer=True)
    assert len(taken) == 2
    assert_close(finished, weights, x, topk, None)
    assert torch.equal(finalize_output(rows), finished)


@on_devices
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_slots_without_an_expert_have_no_row(device, ids):
    wild = [[0, 5, -1], [6, 2, -7], [torch.iinfo(ids).max, torch.iinfo(ids).min, 3]]
    rows = all_experts.rows_of_slots(torch.tensor(wild, dtype=ids, device=device), 6, 3)
    assert rows.dtype == torch.int32
    want = torch.tensor([[0, 15, -1], [-1, 7, -1], [-1, -1, 11]])
    assert torch.equal(rows.cpu().clamp(min=-1), want.int())


@on_devices
@torch.no_grad()
def test_what_is_computed_for_nobody_reaches_nobody(device, taken):
    """An expert that overflows for every token is chosen by one, a token of NaN by itself."""
    weights = make_weights(device=device)
    weights.up[4].fill_(1e38)
    x = make_input(5, device=device)
    x[3] = float("nan")
    topk = make_topk(5, device=device)
    topk.topk_ids.copy_(torch.tensor([[0, 1, 2]]).expand(5, 3))
    topk.topk_ids[0, 0] = 4
    got = create_runner("grouped_mm", weights).run(x, topk, defer=False)
    assert taken and got[[1, 2, 4]].isfinite().all()
    assert not got[0].isfinite().any() and got[3].isnan().all()


def on_a_gpu(num_tokens):
    """Hidden states that say they are on a GPU; nothing of them is read."""
    x = make_input(num_tokens)

    class Claims(torch.Tensor):
        is_cuda = True

    return x.as_subclass(Claims)


def choice_of(num_tokens, num_experts=NUM_EXPERTS):
    return replace(make_topk(num_tokens), num_experts=num_experts)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "wanted"),
    [
        (1, NUM_EXPERTS, False),  # half of them
        (2, NUM_EXPERTS, True),  # three quarters
        (128, NUM_EXPERTS, True),
        (129, NUM_EXPERTS, False),
        (0, NUM_EXPERTS, False),
        (2, None, False),
        (2, 8 * NUM_EXPERTS, False),  # a slice: an eighth of the slots are here
        (20, 8 * NUM_EXPERTS, True),
    ],
)
def test_it_is_taken_where_most_experts_are_hit(num_tokens, num_experts, wanted):
    weights, choice = make_weights(), choice_of(num_tokens, num_experts)
    with torch.no_grad():
        assert all_experts.serves(weights, on_a_gpu(num_tokens), choice) == wanted
        assert not all_experts.serves(weights, make_input(num_tokens), choice), "on a CPU"


def test_the_share_is_that_of_distinct_draws():
    generator = torch.Generator().manual_seed(3)
    for num_tokens in (1, 3, 8):
        scores = torch.rand(4000, num_tokens, 32, generator=generator)
        hit = torch.zeros(4000, 32).scatter_(1, scores.topk(TOP_K).indices.flatten(1), 1.0)
        expected = all_experts.expected_share(num_tokens, TOP_K, 32)
        # 4000 samples of a share with a deviation below 0.05: six standard errors
        assert abs(float(hit.mean()) - expected) < 0.005
    assert all_experts.expected_share(1, 6, 6) == 1.0


def test_it_can_be_turned_off_and_gradients_do_so(monkeypatch):
    weights, choice, x = make_weights(), choice_of(4), on_a_gpu(4)
    assert all_experts.serves(weights, x, choice)
    weights.down.requires_grad_()
    assert not all_experts.serves(weights, x, choice)
    with torch.no_grad():
        assert all_experts.serves(weights, x, choice)
        monkeypatch.setenv("SGL_MOE_JIT_ALL_EXPERTS_MAX_TOKENS", "0")
        assert not all_experts.serves(weights, x, choice)


def test_routers_say_of_how_many_experts_they_chose():
    config = RouterConfig(num_experts=16, top_k=2, score_function="softmax")
    assert select_experts(torch.randn(3, 16), config).num_experts == 16


@pytest.mark.gpu
@torch.no_grad()
def test_both_ways_agree_on_a_gpu(monkeypatch):
    """Each product rounds once to bfloat16 in either way, after sums in another order."""
    weights = make_weights(num_experts=16, hidden=512, width=256, dtype=BF16, device="cuda")
    runner = create_runner("grouped_mm", weights)
    for num_tokens in (4, 64, 128):
        x = make_input(num_tokens, hidden=512, dtype=BF16, device="cuda")
        ids = torch.rand(num_tokens, 16, device="cuda").argsort(1)[:, :6]
        topk = StandardTopKOutput(torch.rand(num_tokens, 6, device="cuda"), ids, num_experts=16)
        assert all_experts.serves(weights, x, topk)
        assert_close(runner.run(x, topk, defer=False), weights, x, topk, None)


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_call_sees_new_ids():
    weights = make_weights(dtype=BF16, device="cuda")
    runner = create_runner("grouped_mm", weights)
    x, topk = (
        make_input(8, dtype=BF16, device="cuda"),
        replace(make_topk(8, device="cuda"), num_experts=NUM_EXPERTS),
    )
    runner.run(x, topk, defer=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = runner.run(x, topk, defer=False)
    for shift in range(3):
        topk.topk_ids.copy_((topk.topk_ids + shift) % NUM_EXPERTS)
        topk.topk_ids[shift] = -1
        graph.replay()
        torch.cuda.synchronize()
        assert_close(got, weights, x, topk, None)
