# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The extension on finalize with residual add and RMSNorm: several outputs, some of them given."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ops import finalize_norm, quick_call
from tests.ops.finalize_norm_cases import BF16, F16, F32, assert_same_bits, make
from tests.ops.quick_call_cases import need_extension, outcome

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def served(x, fp8=False, enable_pdl=None, **outputs):
    """Return what the extension alone makes of a call: the outputs, or None."""
    way = finalize_norm._QUICK_FP8 if fp8 else finalize_norm._QUICK
    names = ("out", "out_scale", "residual_out") if fp8 else ("out", "residual_out")
    tensors = (x.gemm2_out, x.idx, x.weights, x.shared, x.gate, x.residual, x.norm_weight)
    numbers = (x.top_k, x.eps, enable_pdl, x.factor)
    return way.compiled(*tensors, *numbers, *(outputs.get(name) for name in names))


def without(x, **kwargs):
    with quick_call.in_python():
        return x.run(**kwargs)


@on_devices
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kinds"), [(BF16, {}), (F16, {"gate": F32}), (F32, {"weight_dtype": None})]
)
def test_the_same_bits_as_without_it(device, fp8, dtype, kinds):
    need_extension()
    x = make(5, 4, 64, device=device, dtype=dtype, **kinds)
    want = without(x, fp8=fp8)
    got = served(x, fp8)
    assert type(got) is tuple and [t.dtype for t in got] == [t.dtype for t in want]
    assert_same_bits(got, want)
    assert_same_bits(served(x, fp8, enable_pdl=False), want)
    assert_same_bits(
        served(replace(x, factor=int(x.factor)), fp8),
        without(replace(x, factor=int(x.factor)), fp8=fp8),
    )
    assert_same_bits(x.run(fp8=fp8), want)
    for given in range(len(want)):
        names = ("out", "out_scale", "residual_out") if fp8 else ("out", "residual_out")
        buffer = torch.empty_like(want[given])
        got = served(x, fp8, **{names[given]: buffer})
        assert got[given] is buffer and buffer._version == 1
        assert_same_bits(got, want)


@on_devices
def test_parameters_are_served_unless_they_want_a_gradient(device):
    """A norm's weight is one in every model."""
    need_extension()
    x = make(5, 4, 64, device=device)
    want = without(x)
    frozen, wanting = (torch.nn.Parameter(x.norm_weight, requires_grad=r) for r in (False, True))
    assert_same_bits(served(replace(x, norm_weight=frozen)), want)
    x = replace(x, norm_weight=wanting)
    assert served(x) is None
    with torch.no_grad():
        assert_same_bits(served(x), want)
        into = torch.nn.Parameter(torch.empty_like(want[0]))
        assert served(x, out=into)[0] is into and into._version == 1
    assert served(x, out=into) is None
    with torch.inference_mode():
        assert_same_bits(served(x), want)


@on_devices
def test_in_place_it_runs_once(device):
    need_extension()
    x = make(5, 4, 64, device=device)
    want = without(x)
    residual, shared = x.residual.clone(), x.shared.clone()
    got = served(replace(x, residual=residual, shared=shared), out=shared, residual_out=residual)
    assert got[0] is shared and got[1] is residual
    assert_same_bits(got, want)


@on_devices
def test_what_it_does_not_serve_ends_as_without_it(device):
    need_extension()
    x = make(5, 4, 64, device=device)
    x.run()
    strange = [
        {"residual": x.residual.clone().requires_grad_()},
        {"residual": torch._neg_view(x.residual)},
        {"norm_weight": x.norm_weight[:7]},
        {"residual": x.residual.flatten()},
        {"residual": None},
        {"eps": 0.0},
        {"eps": 1},
        {"top_k": 3},
        {"norm_weight": x.norm_weight.double()},
        {"gate": x.residual[:, :2]},
    ]
    for change in strange:
        wrong = replace(x, **change)
        assert served(wrong) is None, change
        for given in ({}, {"residual_out": torch.full_like(x.residual, 7)}):
            assert outcome(lambda w=wrong, g=given: w.run(**g)) == outcome(
                lambda w=wrong, g=given: without(w, **g)
            )
    assert served(x, out=x.gemm2_out) is None and served(x, residual_out=x.shared) is None
    frozen = torch.inference_mode()(lambda: torch.empty_like(x.residual))()
    assert served(x, residual_out=frozen) is None
