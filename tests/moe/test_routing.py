# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing and weighing experts, against one token and one expert at a time in float64."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.routing import select_experts
from tests.moe.routing_cases import CONFIGS, E, K, config
from tests.moe.routing_oracle import INF, NAN, assert_routed, route, spread_logits
from tests.moe.runner_cases import DEVICES

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
every_config = pytest.mark.parametrize("name", CONFIGS)


def extras(routing, seed=3, low=-0.2, high=0.2):
    """The bias and scale that a config asks for."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.empty(routing.num_experts).uniform_(low, high, generator=generator)
    scale = torch.empty(routing.num_experts).uniform_(0.5, 1.5, generator=generator)
    return (
        bias if routing.has_correction_bias else None,
        scale if routing.has_expert_scale else None,
    )


def on(device, x):
    return None if x is None else x.to(device)


def run(logits, routing, bias=None, scale=None, device="cpu", **others):
    return select_experts(
        on(device, logits), routing, on(device, bias), expert_scale=on(device, scale), **others
    )


@on_devices
@every_config
def test_every_way_to_route_equals_the_oracle(device, name):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    logits = spread_logits(300, E)
    output = run(logits, routing, bias, scale, device)
    assert_routed(output, *route(logits, routing, bias, scale), routing)
    assert output.topk_ids.dtype == torch.int32 and output.topk_weights.dtype == torch.float32
    assert output.routed_scaling_factor == (2.5 if name == "sigmoid_factor_due" else 1.0)


@on_devices
@every_config
def test_no_tokens(device, name):
    routing = CONFIGS[name]
    output = run(torch.empty(0, E), routing, *extras(routing), device)
    assert output.topk_ids.shape == output.topk_weights.shape == (0, routing.top_k)


@every_config
def test_a_row_alone_is_the_row_in_the_batch(name):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    logits = torch.randn(9, E, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    whole = run(logits, routing, bias, scale)
    for t in range(9):
        alone = run(logits[t : t + 1], routing, bias, scale)
        assert torch.equal(alone.topk_ids[0], whole.topk_ids[t])
        assert torch.equal(alone.topk_weights[0], whole.topk_weights[t])


# V3's own biases are positive, so its model never shows what a mask of 0.0 does.
@on_devices
@field_report("A3")
@pytest.mark.parametrize(("score", "rule"), [("sigmoid", "top2_sum"), ("softmax", "max")])
def test_no_expert_of_a_closed_group_is_chosen(device, score, rule):
    routing = config(
        score_function=score, has_correction_bias=True, n_group=8, topk_group=2, group_rule=rule
    )
    bias, _ = extras(routing, low=-2.0, high=-1.0)
    logits = spread_logits(500, E, seed=1)
    output = run(logits, routing, bias, device=device)
    assert_routed(output, *route(logits, routing, bias), routing)
    groups = output.topk_ids.cpu() // (E // 8)
    assert all(len(set(row)) <= 2 for row in groups.tolist())


@field_report("A3")
def test_groups_whose_scores_underflow_stay_open():
    # The reference's 0.0 for closed groups would tie with the open group's zeros.
    routing = config(num_experts=8, top_k=3, n_group=2, topk_group=1, group_rule="max")
    logits = torch.tensor([[50.0, -60, -60, -60, 200, -60, -60, -60]])
    output = run(logits, routing)
    assert output.topk_ids.tolist() == [[4, 5, 6]]
    assert output.topk_weights.tolist() == [[1.0, 0.0, 0.0]]


# Two experts at the boundary, then two groups; 20 rows each, as a flaky choice would differ.
@on_devices
@field_report("A5")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "softmax_of_top_k", "sigmoid_bias", "sigmoid_groups"])
def test_ties_go_to_the_lower_id(device, name, dtype):
    routing = CONFIGS[name]
    bias = torch.zeros(E) if routing.has_correction_bias else None
    logits = torch.zeros(20, E, dtype=dtype)
    output = run(logits, routing, bias, device=device)
    assert output.topk_ids.tolist() == [list(range(K))] * 20
    logits[:, 40:43] = 1.0
    output = run(logits, routing, bias, device=device)
    assert output.topk_ids.tolist() == [[40, 41, 42, 0, 1, 2]] * 20


@field_report("A5")
def test_equal_groups_go_to_the_lower_one():
    routing = config(num_experts=16, top_k=2, n_group=4, topk_group=1, score_function="sigmoid")
    logits = torch.full((20, 16), -1.0)
    logits[:, 6:8] = logits[:, 12:14] = 2.0  # groups 1 and 3
    assert run(logits, routing).topk_ids.tolist() == [[6, 7]] * 20


@on_devices
@field_report("A5")
def test_negative_zero_ties_with_zero(device):
    routing = config(num_experts=4, top_k=2, score_after_top_k=True)
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert run(logits, routing, device=device).topk_ids.tolist() == [[1, 2]]


def bad_rows():
    clean = spread_logits(8, E, seed=5)
    dirty = clean.clone()
    dirty[1] = NAN
    dirty[2, 7] = NAN
    dirty[3] = -INF
    dirty[4] = -INF
    dirty[4, 9] = 0.5
    dirty[5, ::2] = NAN
    dirty[6, 3] = -NAN
    return clean, dirty


@on_devices
@field_report("A6")
@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_give_distinct_ids_and_disturb_no_other_row(device, name, dtype):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    clean, dirty = bad_rows()
    before = run(clean.to(dtype), routing, bias, scale, device)
    after = run(dirty.to(dtype), routing, bias, scale, device)
    for row in after.topk_ids.tolist():
        assert len(set(row)) == routing.top_k and all(0 <= i < E for i in row)
    for t in (0, 7):
        assert torch.equal(before.topk_ids[t], after.topk_ids[t])
        assert torch.equal(before.topk_weights[t], after.topk_weights[t])
    # As documented: a softmax over NaN is NaN; elsewhere only where a chosen score is NaN.
    assert after.topk_weights[1].isnan().all()
    is_finite = after.topk_weights.isfinite().all(-1).tolist()
    assert is_finite[4]
    if routing.score_function != "softmax":
        assert is_finite[3]
    if routing.score_function == "softmax" and not routing.score_after_top_k:
        assert after.topk_weights[2].isnan().all()
    elif routing.top_k < E:
        assert is_finite[2] and 7 not in after.topk_ids[2].tolist()


@on_devices
@field_report("A7")
@pytest.mark.parametrize("epsilon", [0.0, 1e-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores_dtype", ["float32", "logits"])
def test_scores_of_zero_weigh_zero(device, epsilon, dtype, scores_dtype):
    routing = replace(
        CONFIGS["sigmoid_bias"], renormalize_epsilon=epsilon, scores_dtype=scores_dtype
    )
    logits = torch.full((3, E), -200.0, dtype=dtype)
    logits[1] = spread_logits(1, E)[0]
    output = run(logits, routing, torch.linspace(0, 1, E), device=device)
    assert output.topk_weights[0].tolist() == output.topk_weights[2].tolist() == [0.0] * K
    assert output.topk_ids[0].tolist() == [63, 62, 61, 60, 59, 58]
    assert abs(float(output.topk_weights[1].sum()) - 2.5) < 2.5 * K * 2.0**-8


@field_report("A7")
@pytest.mark.parametrize("kind", ["add", "clamp"])
def test_an_epsilon_that_does_not_matter_changes_no_bit(kind):
    routing = replace(CONFIGS["sigmoid_bias"], epsilon_kind=kind)
    bias, _ = extras(routing)
    logits = torch.randn(500, E)
    without = run(logits, replace(routing, renormalize_epsilon=0.0), bias)
    assert torch.equal(run(logits, routing, bias).topk_weights, without.topk_weights)


@on_devices
@field_report("M16")
@pytest.mark.parametrize("name", ["softmax_renormalized", "sigmoid_groups", "softmax_expert_scale"])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_padded_rows_get_no_expert_and_disturb_nothing(device, name, as_tensor):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    logits = spread_logits(8, E, seed=6)
    alone = run(logits[:5], routing, bias, scale, device)
    logits[5:] = NAN
    for count in (5, 0, 8, 9):
        given = torch.tensor(count, device=device) if as_tensor else count
        output = run(logits, routing, bias, scale, device, num_token_non_padded=given)
        real = min(count, 5)
        assert torch.equal(output.topk_ids[:real], alone.topk_ids[:real])
        assert torch.equal(output.topk_weights[:real], alone.topk_weights[:real])
        assert bool((output.topk_ids[count:] == -1).all())
        assert not output.topk_weights[count:].any()


def test_ids_from_a_table_are_only_weighed():
    routing = replace(CONFIGS["sqrtsoftplus"], has_correction_bias=False)
    logits = spread_logits(7, E)
    ids, _ = route(spread_logits(7, E, seed=8), routing)
    output = run(logits, routing, topk_ids=ids)
    assert torch.equal(output.topk_ids.long(), ids)
    scores = torch.nn.functional.softplus(logits.double()).sqrt().gather(1, ids)
    expected = 2.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(output.topk_weights.double(), expected, rtol=1e-6, atol=0)


@every_config
def test_the_gradient_is_that_of_the_weights(name):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    logits = spread_logits(3, E).double().requires_grad_()
    bias = None if bias is None else bias.double()

    def weights(x):
        return run(x, routing, bias, scale).topk_weights

    assert torch.autograd.gradcheck(weights, logits)
