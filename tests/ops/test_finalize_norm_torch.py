# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The finalize-norm ops as torch ops: schema, fake, torch.compile, and that no gradient is lost."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad

from sgl_moe_jit.ops import (
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
)
from tests.ops.finalize_cases import DEVICES
from tests.ops.finalize_norm_cases import BF16, F32, assert_same_bits, make

on_devices = pytest.mark.parametrize("device", DEVICES)
on_both = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
OPS = torch.ops.sgl_moe_jit
FP8 = torch.float8_e4m3fn


def schema_args(x, *, gate=None):
    args = (x.gemm2_out, x.idx, x.weights, x.shared, x.top_k, x.residual, x.norm_weight, x.eps)
    return (*args, None, x.factor, gate)


@on_devices
@on_both
def test_opcheck(device, fp8):
    # The two others compare values, which torch 2.13 cannot do with float8.
    utils = ["test_autograd_registration", "test_faketensor"]
    if not fp8:
        utils += ["test_schema", "test_aot_dispatch_dynamic"]
    name = "moe_finalize_fuse_shared_add_rmsnorm" + ("_fp8" if fp8 else "")
    for shared, gate in ((True, True), (False, False)):
        x = make(3, 4, 24, padded=32, device=device, dtype=F32, shared=shared)
        x = replace(x, gemm2_out=x.gemm2_out.nan_to_num())
        logits = torch.zeros(3, device=device) if gate else None
        args = schema_args(x, gate=logits)
        torch.library.opcheck(getattr(OPS, name).default, args, test_utils=utils)
        out = torch.zeros(3, 24, device=device)
        written = [out.to(FP8) if fp8 else out, torch.zeros(3, 24, device=device)]
        if fp8:
            written.append(torch.zeros(3, 1, device=device))
        torch.library.opcheck(
            getattr(OPS, f"{name}_out").default, (*args, *written), test_utils=utils
        )


@on_devices
@on_both
def test_torch_compile_fullgraph_with_changing_token_counts(device, fp8):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def layer(gemm2_out, idx, weights, shared, residual, weight):
        if fp8:
            out, scale, residual_out = moe_finalize_fuse_shared_add_rmsnorm_fp8(
                gemm2_out, idx, weights, shared * 2, 8, residual, weight, 1e-6
            )
            return out.float() * scale, residual_out + 1
        out, residual_out = moe_finalize_fuse_shared_add_rmsnorm(
            gemm2_out, idx, weights, shared * 2, 8, residual, weight, 1e-6
        )
        return out + 1, residual_out + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=frames)
    counts = []
    for num_tokens in (5, 9, 130, 2):
        x = make(num_tokens, 8, 64, device=device)
        args = (x.gemm2_out, x.idx, x.weights, x.shared, x.residual, x.norm_weight)
        torch.testing.assert_close(compiled(*args), layer(*args), rtol=2**-8, atol=2**-8)
        counts.append(frames.frame_count)
    assert len(set(counts)) == 1, f"a token count caused a recompile: {counts}"


def test_the_first_call_may_be_under_the_tracer():
    from sgl_moe_jit.ops import finalize_norm_kernel

    torch._dynamo.reset()
    finalize_norm_kernel._cpu_module.cache_clear()
    finalize_norm_kernel._cpu_kernel.cache_clear()
    x = make(3, 8, 64)

    def layer(*args):
        return moe_finalize_fuse_shared_add_rmsnorm(*args)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    args = (x.gemm2_out, x.idx, x.weights, x.shared, 8, x.residual, x.norm_weight, x.eps)
    assert_same_bits(compiled(*args), x.run())


def test_given_outputs_under_torch_compile():
    torch._dynamo.reset()
    x = make(3, 8, 64)

    def layer(out, residual_out):
        x.run(out=out, residual_out=residual_out)
        return out + 0, residual_out + 0

    out, residual_out = torch.empty(2, 3, 64, dtype=BF16)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(out, residual_out)
    assert_same_bits(got, x.run())
    assert_same_bits((out, residual_out), x.run())

    def in_place(residual):
        return replace(x, residual=residual).run(residual_out=residual)

    with pytest.raises(Exception, match="residual_out: may not be an input while tracing"):
        torch.compile(in_place, fullgraph=True, backend="eager")(x.residual.clone())


@on_both
@pytest.mark.parametrize("which", ["gemm2_out", "weights", "shared", "residual", "norm_weight"])
def test_a_gradient_is_refused_and_never_lost(which, fp8):
    x = make(3, 4, 16, dtype=F32)
    x = replace(x, gemm2_out=x.gemm2_out.nan_to_num())
    wanted = replace(x, **{which: getattr(x, which).clone().requires_grad_()})
    residual_out = wanted.run(fp8)[-1]
    assert residual_out.requires_grad
    with pytest.raises(RuntimeError, match=r"rmsnorm.*: has no gradient; .*ops\.reference_norm"):
        residual_out.sum().backward()
    with pytest.raises(RuntimeError, match="given outputs do not support gradients"):
        wanted.run(fp8, residual_out=torch.empty(3, 16))
    with torch.no_grad():
        assert_same_bits(wanted.run(fp8, residual_out=torch.empty(3, 16)), x.run(fp8))
    with torch.inference_mode():
        assert_same_bits(wanted.run(fp8), x.run(fp8))
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(
            lambda t: replace(x, **{which: t}).run(fp8)[-1],
            (getattr(x, which),),
            (torch.ones_like(getattr(x, which)),),
        )
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        dual = forward_ad.make_dual(getattr(x, which), torch.ones_like(getattr(x, which)))
        replace(x, **{which: dual}).run(fp8)


def test_a_written_output_is_known_to_autograd():
    x = make(3, 4, 16, dtype=F32)
    out, residual_out = torch.zeros(2, 3, 16).unbind()
    versions = out._version, residual_out._version
    x.run(out=out, residual_out=residual_out)
    assert out._version > versions[0] and residual_out._version > versions[1]
    with torch.inference_mode():
        inference = torch.zeros(3, 16)
        x.run(out=inference)
    with pytest.raises(RuntimeError, match="inference tensor may only be written"):
        x.run(out=inference)
    negated = torch._neg_view(torch.zeros(3, 16))
    with pytest.raises(ValueError, match="residual_out: expected a plain tensor, got a negated"):
        x.run(residual_out=negated)


def test_meta_tensors_give_shapes_and_nothing_real_is_left_unwritten():
    x = make(3, 4, 16).to("meta")
    assert [tuple(t.shape) for t in x.run()] == [(3, 16), (3, 16)]
    out, scale, residual_out = x.run(fp8=True)
    assert out.dtype == FP8 and scale.shape == (3, 1) and residual_out.is_meta
    with pytest.raises(ValueError, match="residual_out: expected device meta"):
        x.run(residual_out=torch.zeros(3, 16, dtype=BF16))
