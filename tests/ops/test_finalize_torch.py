# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared as a torch op: schema, fake, autograd, torch.compile, modes."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

import sgl_moe_jit.ops.finalize as finalize_module
from sgl_moe_jit.ops import moe_finalize_fuse_shared, quick_call, reference
from sgl_moe_jit.ops.finalize_backward import rows_backward, weights_backward
from tests.ops.finalize_cases import BF16, DEVICES, F16, F32, assert_same_bits, make

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared.default
OUT_OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out.default


@on_devices
@field_report("J35")
@pytest.mark.parametrize("shared", [True, False])
def test_opcheck(device, shared):
    i = make(3, 4, 24, padded=32, device=device, dtype=F32, shared=shared)
    g = torch.where(i.gemm2_out.isnan(), 0, i.gemm2_out)
    leaves = [g.requires_grad_(), i.idx, i.weights.requires_grad_(), i.shared, 4]
    torch.library.opcheck(OP, (*leaves, None, 2.5, 24))
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    out = torch.empty(3, 24, device=device)
    torch.library.opcheck(OUT_OP, (*detached, None, 2.5, None, out))


@on_devices
@field_report("J35")
def test_torch_compile_fullgraph_with_changing_token_counts(device):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def layer(gemm2_out, idx, weights, shared):
        return moe_finalize_fuse_shared(gemm2_out, idx, weights, shared * 2, 8) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=frames)
    counts = []
    for num_tokens in (5, 9, 130, 2):
        i = make(num_tokens, 8, 64, device=device)
        args = (i.gemm2_out, i.idx, i.weights, i.shared)
        torch.testing.assert_close(compiled(*args), layer(*args), rtol=2**-8, atol=2**-8)
        counts.append(frames.frame_count)
    assert len(set(counts)) == 1, f"a token count caused a recompile: {counts}"


@field_report("J35")
def test_torch_compile_fullgraph_cold(monkeypatch):
    """The first call ever happens under the tracer: nothing of the loader may reach Dynamo."""
    torch._dynamo.reset()
    from sgl_moe_jit.ops import finalize_kernel

    finalize_kernel._cpu_kernel.cache_clear()
    i = make(3, 8, 64)
    compiled = torch.compile(lambda *a: moe_finalize_fuse_shared(*a, 8), fullgraph=True)
    assert_same_bits(compiled(i.gemm2_out, i.idx, i.weights, i.shared), i.run())


@field_report("J35")
def test_out_under_torch_compile():
    torch._dynamo.reset()
    i = make(3, 8, 64)

    def layer(buffer):
        moe_finalize_fuse_shared(i.gemm2_out, i.idx, i.weights, i.shared, 8, out=buffer)
        return buffer + 0

    buffer = torch.empty(3, 64, dtype=BF16)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(buffer)
    assert_same_bits(got, i.run())
    assert_same_bits(buffer, i.run())

    def aliasing(shared):
        return moe_finalize_fuse_shared(i.gemm2_out, i.idx, i.weights, shared, 8, out=shared)

    with pytest.raises(Exception, match="may not be shared_output"):
        torch.compile(aliasing, fullgraph=True, backend="eager")(i.shared.clone())


@pytest.mark.parametrize("shared", [True, False])
def test_gradcheck_of_the_backward_in_float64(shared):
    i = make(4, 3, 5, padded=7, dtype=F32, shared=shared, factor=2.5)
    gemm2_out = torch.where(i.gemm2_out.isnan(), 0.5, i.gemm2_out).double().requires_grad_()
    weights = i.weights.double().requires_grad_()
    args = [gemm2_out, weights]
    if shared:
        args.append(i.shared.double().requires_grad_())

    class Finalize(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gemm2_out, weights, shared=None):
            ctx.save_for_backward(gemm2_out, weights)
            ctx.has_shared = shared is not None
            return reference.moe_finalize_fuse_shared(
                gemm2_out, i.idx, weights, shared, 3, routed_scaling_factor=2.5, hidden_dim=5
            )

        @staticmethod
        def backward(ctx, grad):
            g, w = ctx.saved_tensors
            d_gemm2 = rows_backward(grad, i.idx, w, 3, 2.5, tuple(g.shape), g.dtype)
            d_weights = weights_backward(grad, g, i.idx, 3, 2.5, w.dtype)
            return (d_gemm2, d_weights, grad) if ctx.has_shared else (d_gemm2, d_weights)

    assert torch.autograd.gradcheck(Finalize.apply, args)


@on_devices
@field_report("A17")
@pytest.mark.parametrize("needs", ["gemm2_out", "weights", "shared"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_gradients_equal_the_oracles(device, needs, dtype):
    i = make(6, 4, 24, padded=32, device=device, dtype=dtype, factor=2.5)
    upstream = torch.randn(6, 24, device=device)
    x = getattr(i, needs).clone().requires_grad_()
    (replace(i, **{needs: x}).run().float() * upstream).sum().backward()
    y = getattr(i, needs).double().requires_grad_()
    (replace(i, **{needs: y}).oracle() * upstream.to(dtype).double()).sum().backward()
    # A rounding for each float32 term (24 products for a weight, one for a row), and the result's.
    unit = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[x.dtype]
    scale = y.grad.abs() * unit + 26 * 2**-24 * 2.5 * (
        i.gemm2_out.nan_to_num().abs().max().double() * 24
    )
    wrong = (x.grad.double() - y.grad).abs() > scale
    assert not wrong.any(), f"{int(wrong.sum())} gradients of {needs} are off"
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_rows_are_kept_for_the_gradient_of_the_weights_alone():
    i = make(3, 4, 16, dtype=F32)
    rows, weights = i.gemm2_out.clone().requires_grad_(), i.weights.clone().requires_grad_()
    expected = replace(i, gemm2_out=rows).run()
    (wanted,) = torch.autograd.grad(expected.sum(), rows)

    buffer = rows.detach().clone()
    held = replace(i, gemm2_out=buffer.requires_grad_()).run()
    with torch.no_grad():
        buffer.zero_()  # an engine's buffer is used again: nothing of it was kept
    (got,) = torch.autograd.grad(held.sum(), buffer)
    assert_same_bits(got, wanted)

    buffer = rows.detach().clone()
    held = replace(i, gemm2_out=buffer, weights=weights).run()
    buffer.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.sum().backward()


@field_report("A17")
def test_nothing_is_lost_when_a_gradient_is_wanted():
    i = make(3, 4, 16, dtype=F32)
    shared = i.shared.clone().requires_grad_()
    wanted = replace(i, shared=shared)
    assert wanted.run().requires_grad
    with pytest.raises(RuntimeError, match="out= does not support gradients"):
        wanted.run(out=torch.empty(3, 16))
    with torch.no_grad():
        assert not wanted.run().requires_grad
        wanted.run(out=torch.empty(3, 16))
    with torch.inference_mode():
        assert_same_bits(wanted.run(), i.run())


def test_the_dispatcher_is_passed_by_only_when_nothing_watches(monkeypatch):
    i = make(3, 4, 16, dtype=F32)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        i.run()
    assert OP in seen
    calls = []
    real = finalize_module.run  # of the direct way; the dispatcher's is the schema module's
    monkeypatch.setattr(finalize_module, "run", lambda *a: calls.append(1) or real(*a))
    with quick_call.in_python():
        i.run()
    assert calls == [1]  # plain eager: straight to the kernel
    replace(i, shared=i.shared.clone().requires_grad_()).run()
    assert calls == [1]  # a gradient is wanted: through the dispatcher

    class Subclass(torch.Tensor):
        pass

    replace(i, shared=i.shared.as_subclass(Subclass)).run()
    assert calls == [1]
    both = torch.stack([i.shared, i.shared * 2])
    mapped = torch.func.vmap(lambda s: replace(i, shared=s).run())(both)
    assert calls == [1]
    assert_same_bits(mapped[1], replace(i, shared=both[1]).run())


def test_fake_tensors_run_no_kernel():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        got = moe_finalize_fuse_shared(
            torch.empty(40, 64, dtype=BF16),
            torch.empty(5, 8, dtype=torch.int32),
            torch.empty(5, 8),
            None,
            8,
            hidden_dim=60,
        )
    assert got.shape == (5, 60) and got.dtype == BF16
