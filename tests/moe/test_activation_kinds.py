# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Activations: three meanings of a limit, layouts, and what a model's config asks for."""

import copy
import math
import pickle

import pytest
import torch

from sgl_moe_jit.moe.activation_kinds import (
    GeluTanhGlu,
    Glu,
    Relu2,
    SiTu,
    SwiGlu,
    SwiGluOai,
    activation_of,
)
from sgl_moe_jit.moe.expert_config import ActivationConfig

field_report = pytest.mark.field_report
GATES, UPS = (-50.0, -8.0, -7.0, 0.0, 7.0, 50.0), (-9.0, 9.0)


def silu(g):
    return g / (1 + math.exp(-g))


def of(activation, gate, up):
    """One pair through an activation, in float64, in its own layout."""
    return activation(torch.tensor([[gate, up]], dtype=torch.float64)).item()


@field_report("A11")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("up", UPS)
@pytest.mark.parametrize("is_concatenated", [True, False])
def test_three_meanings_of_a_limit(gate, up, is_concatenated):
    limit, g, u = 7.0, min(gate, 7.0), max(-7.0, min(up, 7.0))
    a = SwiGluOai(is_concatenated, limit=limit)
    assert of(a, gate, up) == pytest.approx(g / (1 + math.exp(-1.702 * g)) * (u + 1), rel=1e-14)
    b = SwiGlu(is_concatenated, limit)
    assert of(b, gate, up) == pytest.approx(silu(g) * u, rel=1e-14)
    c = SwiGlu(is_concatenated, limit, "after")
    assert of(c, gate, up) == pytest.approx(min(silu(gate), limit) * u, rel=1e-14)


@field_report("A11")
def test_the_numbers_of_the_reports():
    # up clamped to 7 and divided out: what is left is the gate's factor
    assert of(SwiGlu(limit=7.0), 50.0, 9.0) / 7 == pytest.approx(6.9936, abs=5e-5)
    assert of(SwiGlu(limit=7.0, clamp="after"), 50.0, 9.0) / 7 == 7.0
    for clamp in ("before", "after"):  # a gate clamped from below would give -0.0064
        assert of(SwiGlu(limit=7.0, clamp=clamp), -8.0, 9.0) / 7 == pytest.approx(-0.0027, abs=5e-5)


@field_report("A11")
@pytest.mark.parametrize("limit", [None, 0, 0.0, math.inf])
@pytest.mark.parametrize("clamp", ["before", "after"])
def test_no_limit_is_no_clamp(limit, clamp):
    x = torch.tensor([[-50.0, 50.0, 9.0, -90.0]])
    plain = torch.nn.functional.silu(x[:, :2]) * x[:, 2:]
    activation = SwiGlu(limit=limit, clamp=clamp)
    assert torch.equal(activation(x), plain)
    assert activation.is_silu_and_mul
    gate, up = x[:, :2], x[:, 2:]
    plain = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    assert torch.equal(SwiGluOai(limit=limit)(x), plain)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SwiGlu(limit=-1.0), "limit: expected a positive number"),
        (lambda: SwiGlu(limit=math.nan), "limit: expected a positive number"),
        (lambda: SwiGluOai(limit=-7.0), "limit: expected a positive number"),
        (lambda: SwiGlu(clamp="between"), "clamp: expected 'before' or 'after', got 'between'"),
    ],
)
def test_what_no_model_means_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_only_plain_halves_are_silu_and_mul():
    assert SwiGlu().is_silu_and_mul
    assert not SwiGlu(is_concatenated=False).is_silu_and_mul
    assert not SwiGlu(limit=10.0).is_silu_and_mul
    assert not SwiGlu().laid_out(False).is_silu_and_mul


KINDS = [
    SwiGlu(limit=3.0),
    SwiGlu(limit=3.0, clamp="after"),
    SwiGluOai(),
    Glu(),
    GeluTanhGlu(),
    SiTu(),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: type(k).__name__)
def test_halves_and_alternating_are_the_same_function(kind):
    gate, up = torch.randn(2, 5, 8, dtype=torch.float64).unbind()
    halves = kind(torch.cat((gate, up), -1))
    alternating = kind.laid_out(False)(torch.stack((gate, up), -1).flatten(-2))
    # torch's exp of adjacent values and of every second one may be two functions.
    torch.testing.assert_close(alternating, halves, rtol=2**-48, atol=0)
    assert kind.laid_out(False).laid_out(True) == kind


@pytest.mark.parametrize("kind", [*KINDS, Relu2()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_is_kept_gradients_are_right_and_it_copies(kind, dtype):
    x = torch.randn(3, 8, dtype=dtype)
    assert kind(x).dtype == dtype
    assert pickle.loads(pickle.dumps(kind)) == kind == copy.deepcopy(kind)
    # away from the kinks of clamps and relu
    x = torch.linspace(-2.9, 2.8, 16, dtype=torch.float64).view(2, 8).requires_grad_()
    assert torch.autograd.gradcheck(kind, (x,))


def test_formulas_of_the_others():
    g, u = 1.5, -2.0
    gelu = 0.5 * g * (1 + math.erf(g / math.sqrt(2)))
    assert of(Glu(), g, u) == pytest.approx(gelu * u, rel=1e-14)
    tanh = 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    assert of(GeluTanhGlu(), g, u) == pytest.approx(tanh * u, rel=1e-14)
    situ = 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
    assert of(SiTu(beta=4.0, linear_beta=25.0), g, u) == pytest.approx(situ, rel=1e-14)
    assert Relu2()(torch.tensor([-3.0, 0.0, 3.0])).tolist() == [0.0, 0.0, 9.0]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ActivationConfig("silu"), SwiGlu(False)),
        (ActivationConfig("silu", limit=10.0, clamp="before"), SwiGlu(False, 10.0)),
        (ActivationConfig("silu", limit=4.0, clamp="after"), SwiGlu(False, 4.0, "after")),
        (
            ActivationConfig("swiglu_oai", limit=7.0, clamp="before", alpha=1.5),
            SwiGluOai(False, 1.5, 7.0),
        ),
        (ActivationConfig("gelu_tanh"), GeluTanhGlu(False)),
        (ActivationConfig("situ", beta=4.0, linear_beta=25.0), SiTu(False, 4.0, 25.0)),
        (ActivationConfig("relu2", is_gated=False), Relu2()),
    ],
)
def test_a_models_declared_activation(config, kind):
    assert activation_of(config, is_concatenated=False) == kind


@pytest.mark.parametrize(
    "config",
    [
        ActivationConfig("silu", is_gated=False),
        ActivationConfig("relu2"),
        ActivationConfig("gelu_tanh", limit=7.0, clamp="before"),
        ActivationConfig("swiglu_oai", limit=7.0, clamp="after"),
        ActivationConfig("situ"),
    ],
)
def test_a_combination_without_a_model_is_refused(config):
    with pytest.raises(ValueError, match="expected"):
        activation_of(config)
