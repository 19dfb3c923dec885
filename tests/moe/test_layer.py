# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``FusedMoE`` against the float64 oracle: layouts, formats, deferral, slices."""

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.activation_kinds import Glu, Relu2, SwiGlu, SwiGluOai
from sgl_moe_jit.moe.deferred import (
    DeferredFinalizeOutput,
    deferred_finalize_context,
    finalize_output,
)
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.prepared_layer import PreparedMoE
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk import (
    BypassedTopKOutput,
    PackedTopKOutput,
    StandardTopKOutput,
    TopKFormat,
)
from tests.moe.layer_cases import E, FakeRunner, fake_config, make_layer
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    F32,
    RUNNERS,
    assert_close,
    make_input,
    make_topk,
    make_weights,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)


def layer_of(weights, **options):
    return FusedMoE(weights, **options)


@on_devices
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_values(device, runner, dtype, factor):
    weights = make_weights(dtype=dtype, device=device, bias=True)
    x = make_input(16, dtype=dtype, device=device)
    topk = make_topk(16, factor=factor, device=device)
    layer, shared = layer_of(weights, runner=runner), torch.full_like(x, 1e3)
    assert layer.runner.name == runner
    assert_close(layer(x, topk), weights, x, topk, None)
    deferred = layer.forward_deferred_finalize(x, topk)
    assert isinstance(deferred, DeferredFinalizeOutput)
    assert_close(finalize_output(deferred, shared), weights, x, topk, shared)


# Shapes from which the layout cannot be told: 2 I == H, and I == H.
@field_report("A12")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (64, 64)])
@pytest.mark.parametrize("kind", [None, SwiGlu(limit=0.5), SwiGluOai(limit=0.5), Glu()])
def test_layout_comes_from_the_flags(is_transposed, is_concatenated, hidden, width, kind):
    weights = make_weights(hidden=hidden, width=width, is_transposed=is_transposed)
    layer = FusedMoE.from_gate_up_down(
        weights.up,
        weights.down,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        activation=kind,
    )
    x, topk = make_input(9, hidden), make_topk(9)
    total = torch.zeros(9, hidden, dtype=torch.float64)
    up, down = weights.up.double(), weights.down.double()
    for token in range(9):
        for k in range(topk.topk_ids.shape[1]):
            expert = int(topk.topk_ids[token, k])
            if not 0 <= expert < up.shape[0]:
                continue
            first, second = up[expert], down[expert]
            if not is_transposed:
                first, second = first.T, second.T
            pair = x[token].double() @ first
            gate, linear = (
                (pair[:width], pair[width:]) if is_concatenated else (pair[::2], pair[1::2])
            )
            row = (SwiGlu() if kind is None else kind).combine(gate, linear) @ second
            total[token] += topk.topk_weights[token, k].double() * row
    # float32: two dot products of at most 64 terms of size one or so, and three of their results
    assert (layer(x, topk).double() - total).abs().max() <= 64 * 3 * 2.0**-24 * total.abs().max()


@field_report("A12")
@pytest.mark.parametrize("missing", ["is_transposed", "is_concatenated"])
def test_a_missing_flag_is_an_error(missing):
    weights = make_weights()
    flags = {"is_transposed": False, "is_concatenated": True}
    del flags[missing]
    with pytest.raises(TypeError, match=missing):
        FusedMoE.from_gate_up_down(weights.up, weights.down, **flags)


@field_report("A27")
def test_experts_without_a_gate():
    weights = make_weights(has_gate=False, bias=True)
    layer = FusedMoE.from_w13_w2(
        weights.up,
        weights.down,
        activation=Relu2(),
        has_gate=False,
        w13_bias=weights.up_bias,
        w2_bias=weights.down_bias,
    )
    oracle = type(weights)(**{**vars(weights), "activation": Relu2()})
    x, topk = make_input(9), make_topk(9)
    assert_close(layer(x, topk), oracle, x, topk, None)


def test_any_callable_is_called_as_it_is():
    weights, seen = make_weights(interleaved=True), []

    def own(x):
        seen.append(x.shape[-1])
        return weights.activation(x)

    layer = FusedMoE.from_gate_up_down(
        weights.up, weights.down, is_transposed=False, is_concatenated=False, activation=own
    )
    x, topk = make_input(9), make_topk(9)
    assert_close(layer(x, topk), weights, x, topk, None)
    assert set(seen) == {32}


def test_names_are_those_of_the_checkpoints():
    weights = make_weights(bias=True)
    layer = FusedMoE.from_w13_w2(
        weights.up, weights.down, w13_bias=weights.up_bias, w2_bias=weights.down_bias
    )
    names = ["w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias"]
    assert list(layer.state_dict()) == names
    layer = layer_of(weights)
    names = ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"]
    assert list(layer.state_dict()) == names
    assert list(layer_of(make_weights(has_gate=False)).state_dict()) == ["up_proj", "down_proj"]


@field_report("C6")
@pytest.mark.parametrize("asked", [None, True, False])
def test_the_context_counts_only_where_it_is_asked_for(asked):
    layer, x, topk = make_layer(), make_input(4), make_topk(4)
    with deferred_finalize_context(enabled=asked is not False):
        assert isinstance(layer(x, topk), torch.Tensor)
        output = layer(x, topk, defer=asked)
    expected = torch.Tensor if asked is False else DeferredFinalizeOutput
    assert isinstance(output, expected)
    assert isinstance(layer(x, topk, defer=None), torch.Tensor)


def test_support_names_runner_format_and_dtype():
    assert make_layer().supports_deferred_finalize(TopKFormat.STANDARD).ok
    support = make_layer(dtype=torch.float64).supports_deferred_finalize(TopKFormat.STANDARD)
    assert not support.ok
    assert support.why.startswith("runner 'native' finishes its own output: ")
    assert "float64" in support.why
    layer = PreparedMoE(FakeRunner([], defers=False), fake_config())
    assert "runner 'fake'" in layer.supports_deferred_finalize().why
    x, topk = make_input(4), make_topk(4, absent=0)
    assert isinstance(layer.forward_deferred_finalize(x, topk), torch.Tensor)


@field_report("M6")
def test_zero_tokens():
    layer, x, topk = make_layer(), make_input(0), make_topk(0)
    assert layer(x, topk).shape == (0, 32)
    assert finalize_output(layer.forward_deferred_finalize(x, topk), x).shape == (0, 32)


@field_report("A27")
def test_a_latent_layer_is_finished_before_its_up_projection():
    """Experts in a narrower space than the shared ones: a fused add is refused by both widths."""
    layer, topk, project = make_layer(hidden=16), make_topk(5), torch.nn.Linear(16, 32)
    latent, shared = make_input(5, 16), make_input(5, 32)
    rows = layer.forward_deferred_finalize(latent, topk)
    with pytest.raises(ValueError, match=r"16.*32|32.*16"):
        rows.finalize(shared)
    out = project(rows.finalize()) + shared
    assert out.shape == (5, 32)
    assert_close(rows.finalize().detach(), layer.expert_weights(), latent, topk, None)


SLICES = [[(0, 3), (3, 3)], [(0, 2), (2, 2), (4, 2)], [(0, 1), (1, 5)]]


def sliced(weights, first, count, **options):
    part = type(weights)(
        **{**vars(weights), "up": weights.up[first:][:count], "down": weights.down[first:][:count]}
    )
    return FusedMoE(part, expert_range=(first, count), **options)


@on_devices
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_slices_sum_to_the_whole(device, runner, slices, ids_dtype):
    weights, x = make_weights(device=device), make_input(12, device=device)
    topk = make_topk(12, factor=2.5, device=device)
    topk = StandardTopKOutput(topk.topk_weights, topk.topk_ids.to(ids_dtype), 2.5)
    parts = [sliced(weights, *which, runner=runner) for which in slices]
    total = sum(part(x, topk).double() for part in parts)
    assert_close(total.float(), weights, x, topk, None)
    deferred = [part.forward_deferred_finalize(x, topk) for part in parts]
    assert_close(sum(d.finalize().double() for d in deferred).float(), weights, x, topk, None)
    # each pair that is somewhere has a row on exactly one rank, and -1 on all others
    index = torch.stack([d.expanded_idx_to_permuted_idx.reshape(12, -1) for d in deferred])
    present = (topk.topk_ids >= 0) & (topk.topk_ids < E)
    assert torch.equal((index >= 0).sum(0), present.long())
    if runner == "grouped_mm":
        assert ((index >= 0) | (index == -1)).all()


@pytest.mark.parametrize("other", [-(2**31), -2, -1, E, E + 1, 2**31 - 1])
def test_ids_without_an_expert_stay_without_one_in_every_slice(other):
    weights, x, topk = make_weights(), make_input(5), make_topk(5)
    ids = torch.full_like(topk.topk_ids, other).int()
    for which in SLICES[1]:
        out = sliced(weights, *which)(x, StandardTopKOutput(topk.topk_weights, ids))
        assert not out.any()


def test_a_slice_takes_every_format():
    weights, x = make_weights(), make_input(7)
    config = RouterConfig(E, 3, "softmax")
    logits = make_input(7, E, seed=4)
    outputs = [BypassedTopKOutput(logits, config)]
    outputs.append(outputs[0].to_standard())
    outputs.append(PackedTopKOutput.pack(outputs[1]))
    rounded = outputs[2].to_standard()
    for topk, reference in zip(outputs, (outputs[1], outputs[1], rounded), strict=True):
        total = sum(sliced(weights, *which)(x, topk).double() for which in SLICES[0])
        assert_close(total.float(), weights, x, reference, None)


def test_a_prepared_runner_gets_router_logits_as_they_are_and_local_ids():
    runner = FakeRunner([])
    layer = PreparedMoE(runner, fake_config(experts=3), expert_range=(3, 3))
    x, topk = make_input(4), make_topk(4, absent=0)
    layer(x, topk)
    assert torch.equal(runner.seen[0][0].topk_ids, topk.topk_ids - 3)
    bypassed = BypassedTopKOutput(make_input(4, E), RouterConfig(E, 3, "softmax"))
    assert layer._localize(bypassed) is bypassed
    text = "PreparedMoE, one rank, the layer's experts 3 to 5: fake"
    assert str(layer.explain()) == text and layer.explain().plan is None


def test_explain_names_the_runner_and_why_not_the_others():
    layer = make_layer(hidden=30)
    explanation = layer.explain()
    text = str(explanation)
    assert text.startswith("FusedMoE, one rank: native (asked for: auto)")
    assert "6 experts, hidden 30, width 16, float32" in text
    assert dict(explanation.plan.refused)["grouped_mm"].startswith("strides: ")
    assert "experts=6, hidden=30" in repr(layer)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: make_layer(expert_range=(0, 5)), ValueError, "expected count 6, .* got 5"),
        (lambda: make_layer(expert_range=(-1, 6)), ValueError, "expected first >= 0"),
        (lambda: make_layer(reduce_results=True), ValueError, "a tp_group or an ep_group"),
        (
            lambda: FusedMoE.from_w13_w2(torch.ones(2, 8, 4), torch.ones(2, 4, 5)),
            ValueError,
            "do not belong together",
        ),
        (
            lambda: FusedMoE.from_w13_w2(
                torch.ones(2, 8, 4, requires_grad=True), torch.ones(2, 4, 4)
            ),
            ValueError,
            r"w13_weight: expected a torch\.nn\.Parameter",
        ),
        (lambda: make_layer(runner="none").runner, ValueError, "runner: expected one of auto"),
        (
            lambda: make_layer(hidden=30, runner="grouped_mm").runner,
            UnsupportedError,
            "cannot serve this layer: strides",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
