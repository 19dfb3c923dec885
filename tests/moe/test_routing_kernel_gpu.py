# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The routing kernel chooses and weighs as the torch operations do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.moe import topk_selection
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.ops import route_topk
from tests.moe.routing_cases import CONFIGS, E, config
from tests.moe.routing_oracle import assert_routed, route, spread_logits
from tests.moe.test_routing import extras

pytestmark = pytest.mark.gpu
V3 = CONFIGS["sigmoid_groups"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def by_torch(monkeypatch, *arguments, **others):
    """The same call in plain torch."""
    with monkeypatch.context() as patch:
        patch.setenv(env.ROUTING_KERNEL.name, "0")
        return select_experts(*arguments, **others)


def assert_as_torch(got, want, routing, logits, bias=None):
    """The same ids, and weights to the roundings of two orders of summation.

    Where a row's ids differ, which only a softmax may, what was chosen instead has the same score
    but for the roundings of its sum.
    """
    same = (got.topk_ids == want.topk_ids).all(-1)
    if routing.score_function != "softmax" or routing.score_after_top_k:
        assert bool(same.all())
    assert got.topk_weights.dtype == want.topk_weights.dtype
    terms = routing.num_experts.bit_length() + 32 if routing.score_function == "softmax" else 0
    unit = 2.0**-24
    if routing.scores_dtype == "logits" or routing.weights_dtype == "logits":
        unit = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}[logits.dtype]
    tolerance = (terms + routing.top_k + 4) * unit if unit == 2.0**-24 else 4 * unit
    torch.testing.assert_close(
        got.topk_weights[same], want.topk_weights[same], rtol=tolerance, atol=0, equal_nan=True
    )
    if not bool(same.all()):
        scores = topk_selection.apply_scores(logits, routing)
        choice = (scores if bias is None else scores + bias)[~same]
        mine, theirs = (choice.gather(1, x.topk_ids[~same].long()) for x in (got, want))
        torch.testing.assert_close(mine, theirs, rtol=4 * tolerance, atol=0)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("scores_dtype", ["float32", "logits"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_as_in_torch(monkeypatch, name, dtype, scores_dtype):
    routing = replace(CONFIGS[name], scores_dtype=scores_dtype, weights_dtype="logits")
    bias, scale = (None if x is None else x.cuda() for x in extras(routing))
    logits = torch.randn(1000, E, device="cuda").to(dtype)
    want = by_torch(monkeypatch, logits, routing, bias, expert_scale=scale)
    got = select_experts(logits, routing, bias, expert_scale=scale)
    assert_as_torch(got, want, routing, logits, bias)


SIZES = [
    (experts, top_k)
    for experts in (1, 8, 60, 128, 160, 256, 384, 512, 768, 1024)
    for top_k in (1, 2, 4, 6, 8, 10, 16, 64)
    if top_k <= experts
]


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_sizes(monkeypatch, experts, top_k):
    logits = torch.randn(333, experts, device="cuda")
    for groups, open_groups in ((1, 1), (2, 1), (4, 2), (8, 4), (8, 1), (32, 5), (32, 31)):
        if experts % groups or top_k > experts // groups * open_groups:
            continue
        for rule in ("top2_sum", "max"):
            routing = config(
                num_experts=experts,
                top_k=top_k,
                score_function="sigmoid",
                has_correction_bias=True,
                renormalize=True,
                n_group=groups,
                topk_group=open_groups,
                group_rule=rule,
            )
            bias = extras(routing)[0].cuda()
            want = by_torch(monkeypatch, logits, routing, bias)
            got = select_experts(logits, routing, bias)
            assert_as_torch(got, want, routing, logits, bias)
    routing = config(num_experts=experts, top_k=top_k, renormalize=True)
    want = by_torch(monkeypatch, logits, routing)
    assert_as_torch(select_experts(logits, routing), want, routing, logits)


EDGES = torch.tensor(
    [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0**-149, -(2.0**-140)]
)


# In logits and in the bias, with groups, so that whole groups are NaN or infinite in some rows.
@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_values_at_the_edge(monkeypatch, groups, function):
    routing = config(
        num_experts=64,
        top_k=8,
        score_function=function,
        has_correction_bias=True,
        renormalize=True,
        n_group=groups,
        topk_group=(groups + 1) // 2,
    )
    for share in (0.05, 0.5, 1.0):
        logits, bias = torch.randn(500, 64) * 4, torch.randn(64)
        logits = torch.where(
            torch.rand(logits.shape) < share, EDGES[torch.randint(len(EDGES), logits.shape)], logits
        )
        bias = torch.where(
            torch.rand(64) < share / 2, EDGES[torch.randint(len(EDGES), (64,))], bias
        )
        there = logits.cuda(), routing, bias.cuda()
        assert_as_torch(select_experts(*there), by_torch(monkeypatch, *there), routing, there[0])


@pytest.mark.parametrize("experts", [384, 1024])
def test_large_models_as_the_oracle(experts):
    routing = replace(V3, num_experts=experts, n_group=1, topk_group=1, top_k=8)
    bias, _ = extras(routing)
    logits = spread_logits(40, experts, step=0.02)
    output = select_experts(logits.cuda(), routing, bias.cuda())
    assert_routed(output, *route(logits, routing, bias), routing)


@pytest.mark.parametrize("name", ["softmax", "sigmoid_groups", "sqrtsoftplus", "top_all"])
def test_a_row_alone_is_the_row_in_the_batch_on_every_run(monkeypatch, name):
    routing = CONFIGS[name]
    bias = extras(routing)[0]
    bias = None if bias is None else bias.cuda()
    logits = torch.randn(517, E, device="cuda")
    logits[::7] = float("nan")
    whole = select_experts(logits, routing, bias)
    monkeypatch.setenv(env.PDL.name, "0")
    for rows in (slice(0, 517), slice(3, 4), slice(516, 517), slice(11, 400)):
        part = select_experts(logits[rows], routing, bias)
        assert torch.equal(part.topk_ids, whole.topk_ids[rows])
        assert torch.equal(
            part.topk_weights.view(torch.int32), whole.topk_weights[rows].view(torch.int32)
        )


def test_rows_apart_and_off_any_boundary(monkeypatch):
    bias = extras(V3)[0].cuda()
    wide = torch.randn(50, 3 * E + 1, device="cuda")
    for logits in (wide[:, 1 : E + 1], wide[::3, 5 : E + 5], wide[0, :E].expand(9, E)):
        want = select_experts(logits.contiguous(), V3, bias)
        got = select_experts(logits, V3, bias)
        assert torch.equal(got.topk_ids, want.topk_ids)
        assert torch.equal(got.topk_weights, want.topk_weights)
    transposed = torch.randn(E, 5, device="cuda").t()  # left to torch
    want = by_torch(monkeypatch, transposed, V3, bias)
    assert torch.equal(select_experts(transposed, V3, bias).topk_ids, want.topk_ids)


def test_more_logits_than_31_bits_count():
    routing = config(num_experts=1024, top_k=2)
    num_tokens = 2**21 + 5
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of device memory")
    logits = torch.zeros(num_tokens, 1024, dtype=BF16, device="cuda")
    logits[-4:, 7], logits[-4:, 900] = 2.0, 3.0
    assert select_experts(logits, routing).topk_ids[-5:].tolist() == [[0, 1]] + 4 * [[900, 7]]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_graph_sees_the_number_of_rows_change(shape, dtype):
    count = torch.full(shape, 4, dtype=dtype, device="cuda")
    bias = extras(V3)[0].cuda()
    logits = torch.randn(11, E, device="cuda")
    plain = select_experts(logits, V3, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = select_experts(logits, V3, bias, num_token_non_padded=count)
    for real in (4, 0, 11, 99, -3, 1):
        count.fill_(real)
        graph.replay()
        rows = max(0, min(real, 11))
        assert torch.equal(output.topk_ids[:rows], plain.topk_ids[:rows])
        assert torch.equal(output.topk_weights[:rows], plain.topk_weights[:rows])
        assert bool((output.topk_ids[rows:] == -1).all()) and not output.topk_weights[rows:].any()
        by_int = select_experts(logits, V3, bias, num_token_non_padded=real)
        assert torch.equal(by_int.topk_ids, output.topk_ids)


def test_gradients_go_through_torch():
    logits = torch.randn(5, E, device="cuda", requires_grad=True)
    bias = extras(V3)[0].cuda()
    output = select_experts(logits, V3, bias)
    output.topk_weights.square().sum().backward()
    assert logits.grad is not None and bool(logits.grad.any())
    with torch.no_grad():
        alone = select_experts(logits, V3, bias)
    assert torch.equal(alone.topk_ids, output.topk_ids) and not alone.topk_weights.requires_grad


@pytest.mark.parametrize("kind", [F32, BF16, F16])
def test_scores_of_sigmoid_have_torchs_bits(monkeypatch, kind):
    """Every bfloat16 and float16 there is, and as many float32."""
    routing = config(num_experts=1, top_k=1, score_function="sigmoid")
    logits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int16)[:, None]
    logits = (logits.int() * 65536 + 12345).view(F32) if kind is F32 else logits.view(kind)
    got = select_experts(logits, routing).topk_weights
    want = by_torch(monkeypatch, logits, routing).topk_weights
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))


def test_what_the_kernels_door_refuses():
    options = V3.kernel_options
    for changes, text in (
        ({"top_k": 65}, "top_k: expected 1 to 64, got 65"),
        ({"top_k": 33}, "top_k: expected at most 32, the experts in 4 of 8 groups, got 33"),
        ({"n_group": 7}, "n_group: expected a divisor of 64 up to 32, got 7"),
        ({"topk_group": 9}, "topk_group: expected 1 to 8, got 9"),
    ):
        with pytest.raises(ValueError, match=text):
            route_topk.route_topk(torch.zeros(2, E, device="cuda"), options._replace(**changes))
    logits = torch.zeros(2, E, device="cuda")
    with pytest.raises(ValueError, match=r"correction_bias: expected \[64\], got \[63\]"):
        route_topk.route_topk(logits, options, torch.zeros(63, device="cuda"))
    with pytest.raises(TypeError, match="correction_bias: expected float32, got bfloat16"):
        route_topk.route_topk(logits, options, torch.zeros(E, device="cuda", dtype=BF16))
    with pytest.raises(ValueError, match="expert_scale: expected device cuda:0 like the first"):
        route_topk.route_topk(logits, options, None, torch.zeros(E))
    with pytest.raises(TypeError, match="num_token_non_padded: expected int32 or int64, got"):
        route_topk.route_topk(logits, options, None, None, torch.zeros(1, device="cuda"))
