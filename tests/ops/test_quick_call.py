# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The extension for eager calls: whom it serves, and what a module gets."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_moe_jit import env
from sgl_moe_jit.ops import finalize, finalize_kernel, library, quick_call
from tests.ops.finalize_cases import BF16, F16, F32, assert_same_bits, make
from tests.ops.quick_call_cases import (
    QUICK_FUNCTION,
    STRANGE,
    address_of,
    need_extension,
    outcome,
    served,
)


@pytest.fixture(autouse=True)
def extension():
    need_extension()
    make(1, 4, 16).run()  # top 4 has a module from here on


@pytest.fixture
def asked(monkeypatch):
    """What a module for top 4 was asked, as (given, flags, cpu, integers); it declines."""
    calls = []

    def decline(call):
        c = call.contents
        given = [i for i in range(10) if c.given >> i & 1]
        calls.append((given, c.flags, tuple(c.cpu), [c.values[i].integer for i in (5, 8)]))
        return False

    function = QUICK_FUNCTION(decline)
    kernel = finalize_kernel.Kernel(None, None, address_of(function))
    monkeypatch.setitem(finalize_kernel.LAST_CPU_KERNEL, 4, kernel)
    yield calls
    del function


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, None])
@pytest.mark.parametrize("gate", [None, F32])
def test_the_same_bits_as_without_it(dtype, weight_dtype, gate):
    i = make(5, 4, 24, padded=32, dtype=dtype, weight_dtype=weight_dtype, gate=gate, factor=2.5)
    with quick_call.in_python():
        want = i.run()
    got = served(i)
    assert type(got) is torch.Tensor and got.is_contiguous() and not got.requires_grad
    assert_same_bits(got, want)
    out = torch.empty_like(want)
    assert served(i, out=out) is out
    assert_same_bits(out, want)
    assert_same_bits(i.run(), want)


@pytest.mark.parametrize("factor", [1, 3, -1, 2**53 + 1, 2**63 - 1])
def test_a_factor_may_be_an_int(factor):
    i = make(3, 4, 16, dtype=F32, factor=factor)
    with quick_call.in_python():
        want = i.run()
    assert_same_bits(served(i), want)


def test_without_a_shared_row_the_width_is_an_argument():
    i = make(5, 4, 24, padded=32, shared=False)
    with quick_call.in_python():
        want = i.run()
    assert_same_bits(served(i), want)
    assert served(i, out=torch.empty(5, 24, dtype=BF16)) is None  # the long way compares widths
    assert served(make(0, 4, 16)).shape == (0, 16)


@pytest.mark.parametrize("name", STRANGE)
def test_what_it_does_not_serve_ends_as_without_it(name):
    i = make(5, 4, 16, gate=F32)
    field, change = STRANGE[name]
    i = replace(i, **{field: change(getattr(i, field))})
    assert served(i) is None
    out = torch.full((5, 16), 7.0, dtype=BF16)
    assert served(i, out=out) is None
    assert out._version == 0 and (out == 7).all()
    errors = [outcome(i.run), outcome(lambda: i.run(out=out))]
    with quick_call.in_python():
        assert [outcome(i.run), outcome(lambda: i.run(out=torch.full_like(out, 7)))] == errors


def test_an_output_narrower_than_the_rows_is_refused(monkeypatch):
    i = replace(make(5, 4, 24, padded=32, shared=False), hidden_dim=None)
    narrow, wide = torch.full((5, 24), 7.0, dtype=BF16), torch.empty(5, 32, dtype=BF16)
    assert served(i, out=narrow) is None and served(i, out=wide) is wide
    willing = finalize_kernel.Kernel(lambda *_: True, None, 0)
    monkeypatch.setitem(finalize_kernel.LAST_KERNEL, 4, willing)
    in_python = (i.gemm2_out, i.idx, i.weights, None, None, 4, None, 1.0, None)
    assert finalize._quick_in_python(*in_python, narrow) is None
    assert finalize._quick_in_python(*in_python, wide) is wide
    with pytest.raises(ValueError, match="out: expected width 32, got 24"):
        i.run(out=narrow)
    assert (narrow == 7).all()


def test_in_python_only_what_cannot_be_negated_is_served(monkeypatch):
    willing = finalize_kernel.Kernel(lambda *_: True, None, 0)
    monkeypatch.setitem(finalize_kernel.LAST_KERNEL, 4, willing)
    for dtype in (BF16, F16, F32):
        i = make(5, 4, 16, dtype=dtype)
        tensors = (i.gemm2_out, i.idx, i.weights, i.shared, i.gate)
        new = finalize._quick_in_python(*tensors, 4, None, 1.0, None, None)
        assert new.shape == (5, 16) if dtype is BF16 else new is None


def test_wrong_outputs_and_switches_end_as_without_it():
    i = make(5, 4, 16)
    calls = [
        lambda: i.run(enable_pdl=1),
        lambda: i.run(out=i.gemm2_out),
        lambda: i.run(out=torch.empty(5, 17, dtype=BF16)),
        lambda: i.run(out=torch.empty(5, 16)),
        lambda: i.run(out=torch._neg_view(torch.empty(5, 16, dtype=BF16))),
        lambda: i.run(out=torch.empty(5, 16, dtype=BF16, requires_grad=True)),
        lambda: i.run(out="here"),
    ]
    errors = [outcome(call) for call in calls]
    assert None not in errors
    with quick_call.in_python():
        assert [outcome(call) for call in calls] == errors
    with pytest.raises(TypeError, match="expected 10 positional arguments"):
        finalize._QUICK.compiled(i.gemm2_out)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "watch", [_Dispatch, _Function, torch.autograd.forward_ad.dual_level], ids=lambda w: w.__name__
)
def test_whoever_watches_is_not_passed_by(watch, asked):
    i = make(5, 4, 16)
    with watch():
        assert served(i) is None
    assert asked == []
    assert served(i) is None
    assert len(asked) == 1


def test_a_default_device_changes_nothing(asked):
    i = make(5, 4, 16)
    with torch.device("meta"):
        assert served(i) is None and len(asked) == 1
        assert library.can_bypass_dispatcher(i.gemm2_out)
        with torch.device("meta"):
            assert served(i) is None and len(asked) == 2
        with _Function():
            assert served(i) is None and not library.can_bypass_dispatcher(i.gemm2_out)
        with quick_call.in_python():
            want = i.run()
        assert_same_bits(i.run(), want)
        assert_same_bits(i.run(out=torch.empty_like(want)), want)
    with _Function(), torch.device("meta"):
        assert served(i) is None
    assert len(asked) == 2


def test_tracing_and_functorch_are_not_passed_by(asked):
    i = make(5, 4, 16)
    seen = []

    def call(shared):
        seen.append(served(replace(i, shared=shared)))
        return shared

    torch.jit.trace(call, i.shared, check_trace=False)
    torch.func.vmap(call)(torch.stack([i.shared, i.shared]))
    torch.func.grad(lambda s: call(s).float().sum())(i.shared)
    assert seen == [None] * 3 and asked == []


def test_gradients_are_left_to_autograd_in_grad_mode_only():
    i = make(5, 4, 16, gate=F32)
    for field in ("gemm2_out", "weights", "shared", "gate"):
        wants = replace(i, **{field: getattr(i, field).nan_to_num().requires_grad_()})
        assert served(wants) is None
        wants.run().float().sum().backward()
        assert getattr(wants, field).grad is not None
        with torch.no_grad():
            assert served(wants) is not None
        with torch.inference_mode():
            assert served(wants) is not None


def test_negations_are_left_to_the_dispatcher():
    i = make(5, 4, 16, dtype=F32, gate=F32)
    for field in ("gemm2_out", "weights", "shared", "gate"):
        value = getattr(i, field)
        negated = replace(i, **{field: torch._neg_view(value)})
        assert served(negated) is None
        assert_same_bits(negated.run(), replace(i, **{field: -value}).run())


def test_what_a_module_gets(asked, monkeypatch):
    i = make(5, 4, 16)
    served(i)
    served(replace(i, weights=None, hidden_dim=16), enable_pdl=True)
    served(i, enable_pdl=False)
    both = env.FLAG_PDL | env.FLAG_VECTOR
    settings = finalize_kernel.cpu_settings()
    assert asked == [
        ([0, 1, 2, 3, 5, 7], both, settings, [4, 0]),
        ([0, 1, 3, 5, 6, 7, 8], both, settings, [4, 16]),
        ([0, 1, 2, 3, 5, 6, 7], env.FLAG_VECTOR, settings, [4, 0]),
    ]
    monkeypatch.setenv(env.VECTOR.name, "0")
    served(i)
    assert asked[-1][1] == env.FLAG_PDL
    monkeypatch.setenv(env.VECTOR.name, "1")
    served(i)
    assert asked[-1][1] == both
    monkeypatch.setenv(env.CHECK_INDICES.name, "1")
    assert served(i) is None and len(asked) == 5  # the long way looks at them
    monkeypatch.delenv(env.CHECK_INDICES.name)
    monkeypatch.setenv(env.PDL.name, "maybe")
    assert served(i) is None and len(asked) == 5
    monkeypatch.delenv(env.PDL.name)
    served(i)
    assert len(asked) == 6 and asked[-1][1] == both
    monkeypatch.setenv(env.PDL.name, "maybe")
    for _ in range(3):  # no kernel for a CPU reads it
        i.run()
    with quick_call.in_python():
        i.run()


def test_a_new_output_is_a_tensor_of_torchs_own():
    i = make(5, 4, 16)
    want = i.run(out=torch.empty(5, 16, dtype=BF16))
    with quick_call.in_python():
        long_way = i.run()
    for got in (served(i), long_way):
        assert got._version == 0 and got.is_leaf and got._base is None
        assert got.untyped_storage().resizable()
        got.resize_(7, 16)
        assert_same_bits(got[:5], want)
    wanting = replace(i, shared=i.shared.clone().requires_grad_())
    assert wanting.run().detach().untyped_storage().resizable()


def test_a_write_is_seen_by_autograd():
    i = make(5, 4, 16)
    out = torch.empty(5, 16, dtype=BF16)
    scale = torch.ones_like(out, requires_grad=True)
    product = (out * scale).sum()
    assert served(i, out=out) is out and out._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        frozen = torch.empty_like(out)
        assert served(i, out=frozen) is frozen and served(i).is_inference()
    assert served(i, out=frozen) is None
    with pytest.raises(RuntimeError, match="inference tensor"):
        i.run(out=frozen)
