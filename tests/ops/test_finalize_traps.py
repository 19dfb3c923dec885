# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a direct kernel call would lose or overwrite silently, and does not."""

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sgl_moe_jit.ops import finalize_kernel, moe_finalize_fuse_shared, quick_call
from tests.ops.finalize_cases import BF16, DEVICES, F32, assert_same_bits, make
from tests.ops.quick_call_cases import QUICK_FUNCTION, address_of, need_extension

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared.default
OUT_OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out.default


def test_forward_mode_is_refused_not_dropped():
    i = make(3, 4, 16, dtype=F32, gate=F32)
    for needs in ("gemm2_out", "weights", "shared", "gate"):
        x = getattr(i, needs).nan_to_num()
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(lambda y, n=needs: replace(i, **{n: y}).run(), (x,), (x,))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jacfwd(lambda y, n=needs: replace(i, **{n: y}).run())(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            with pytest.raises(NotImplementedError, match="moe_finalize_fuse_shared"):
                replace(i, **{needs: dual}).run()
            i.run()  # no tangent: nothing to lose
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                OP(*raw_gated(replace(i, **{needs: dual})))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(lambda y, n=needs: OP(*raw_gated(replace(i, **{n: y}))), (x,), (x,))


@on_devices
@field_report("A17")
def test_writing_out_tells_autograd(device):
    i = make(3, 4, 16, dtype=F32, device=device)
    p = torch.randn(3, 16, device=device, requires_grad=True)
    for call in (lambda o: i.run(out=o), lambda o: OUT_OP(*raw(i), None, 1.0, None, o)):
        out = torch.randn(3, 16, device=device)
        y = (out * p).sum()
        call(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def raw(i):
    return i.gemm2_out, i.idx, i.weights, i.shared, i.top_k


def raw_gated(i):
    return *raw(i), None, i.factor, None, i.gate


def test_an_inference_tensor_as_out():
    i = make(3, 4, 16, dtype=F32)
    with torch.inference_mode():
        out = torch.empty(3, 16)
        assert_same_bits(i.run(out=out), i.run())
    with pytest.raises(RuntimeError, match="out: an inference tensor"):
        i.run(out=out)


def test_pending_negations_and_absent_storages_are_resolved():
    i = make(4, 2, 16, dtype=F32, absent=0.0)
    negated = torch._neg_view(i.gemm2_out)
    resolved = replace(i, gemm2_out=-i.gemm2_out).run()
    assert_same_bits(replace(i, gemm2_out=negated).run(), resolved)
    zeros = torch._efficientzerotensor(i.gemm2_out.shape)  # resolved to one expanded zero
    with pytest.raises(ValueError, match="gemm2_out: expected adjacent columns"):
        replace(i, gemm2_out=zeros).run()


@pytest.fixture(params=["C", "Python"])
def asked(request, monkeypatch):
    """The calls in which the quick way asked its guess, which declines, for bfloat16 and top 2."""
    calls = []

    def decline(*args):
        calls.append(args)

    if request.param == "Python":
        kernel = finalize_kernel.Kernel(write=decline, check=None, quick=0)
        monkeypatch.setitem(finalize_kernel.LAST_KERNEL, 2, kernel)
        monkeypatch.setitem(finalize_kernel.LAST_GATED_KERNEL, 2, kernel)
        with quick_call.in_python():
            yield calls
    else:
        need_extension()
        declining = QUICK_FUNCTION(lambda call: bool(calls.append(call)))
        kernel = finalize_kernel._cpu_kernel()._replace(quick=address_of(declining))
        monkeypatch.setattr(finalize_kernel, "_cpu_kernel", lambda: kernel)
        monkeypatch.setitem(finalize_kernel.LAST_CPU_KERNEL, 2, kernel)
        yield calls


@pytest.mark.parametrize("name", ["weights", "gate"])
def test_the_quick_way_leaves_pending_negations_to_the_dispatcher(name, asked):
    i = make(4, 2, 16, gate=F32)
    value = getattr(i, name)
    got = replace(i, **{name: torch._neg_view(value)}).run()
    assert asked == []  # a kernel would read the bits without the negation
    assert_same_bits(got, replace(i, **{name: -value}).run())
    assert len(asked) == 1


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_the_quick_way_leaves_traced_calls_to_the_dispatcher(pre_dispatch, asked):
    i = make(4, 2, 16)
    graph = make_fx(lambda rows: replace(i, gemm2_out=rows).run(), pre_dispatch=pre_dispatch)(
        i.gemm2_out
    )
    assert asked == [] and "moe_finalize_fuse_shared" in graph.code


def test_the_gradient_of_a_gradient_is_clean_of_unreferenced_rows():
    i = make(4, 3, 5, dtype=F32, absent=0.5, seed=3)
    gemm2_out = i.gemm2_out.clone()
    used = i.idx[i.idx >= 0].long()
    if 0 in used:
        gemm2_out = gemm2_out.roll(1, 0)
        i = replace(i, idx=torch.where(i.idx >= 0, (i.idx + 1) % len(gemm2_out), i.idx))
    assert gemm2_out[0].isnan().all()
    leaves = [gemm2_out.requires_grad_(), i.weights.clone().requires_grad_()]
    out = replace(i, gemm2_out=leaves[0], weights=leaves[1]).run()
    first = torch.autograd.grad((out * out).sum(), leaves, create_graph=True)
    loss = sum(g.square().sum() for g in first)
    second = torch.autograd.grad(loss, leaves)
    assert all(g.isfinite().all() for g in (*first, *second))


def test_tracing_refuses_out_that_is_the_shared_output():
    from torch.fx.experimental.proxy_tensor import make_fx

    i = make(3, 4, 16, dtype=F32)
    with pytest.raises(ValueError, match="may not be shared_output while tracing"):
        make_fx(lambda shared: replace(i, shared=shared).run(out=shared))(i.shared.clone())


def test_a_dual_tensor_in_compiled_code_is_refused():
    torch._dynamo.reset()
    i = make(3, 4, 16, dtype=F32)
    compiled = torch.compile(lambda s: replace(i, shared=s).run(), backend="aot_eager")
    compiled(i.shared)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(i.shared, i.shared)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            compiled(dual)


def test_a_refused_call_leaves_out_as_it_was():
    i = make(3, 4, 16, dtype=F32)
    idx = i.idx.clone()
    idx[0, 0] = 99
    out, x = torch.zeros(3, 16), torch.randn(3, 16, requires_grad=True)
    y = (x * out).sum()
    with pytest.raises(ValueError, match="indices below"):
        replace(i, idx=idx).run(out=out)
    y.backward()
    with pytest.raises(ValueError, match="out: expected a plain tensor, got a negated view"):
        i.run(out=torch._neg_view(out))


def test_meta_tensors_have_shapes():
    got = moe_finalize_fuse_shared(
        torch.empty(40, 64, dtype=BF16, device="meta"),
        torch.empty(5, 8, dtype=torch.int32, device="meta"),
        torch.empty(5, 8, device="meta"),
        None,
        8,
    )
    assert got.shape == (5, 64) and got.device.type == "meta"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [-2.5, float("inf"), float("nan")])
@pytest.mark.parametrize("gate", [None, F32], ids=["plain", "gated"])
def test_a_factor_does_not_touch_a_token_without_rows(device, factor, gate):
    inputs = make(4, 3, 40, absent=1.0, factor=factor, gate=gate, device=device)
    plain = replace(inputs, factor=1.0)
    assert_same_bits(inputs.run(), plain.run())
    if gate is None:
        alone = replace(inputs, shared=None, hidden_dim=40)
        assert_same_bits(alone.run(), torch.zeros(4, 40, dtype=BF16, device=device))
