# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared with the shared expert's gate: values, gradients, torch.compile."""

import math
from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ops import moe_finalize_fuse_shared, reference
from sgl_moe_jit.ops.finalize_backward import gate_backward
from tests.ops.finalize_cases import (
    BF16,
    DEVICES,
    F16,
    F32,
    assert_matches_oracle,
    assert_same_bits,
    make,
)

on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared.default
OUT_OP = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out.default


def test_the_oracle_against_numbers_worked_out_by_hand():
    got = reference.moe_finalize_fuse_shared(
        torch.tensor([[8.0, 1.0], [4.0, 1.0]]),
        torch.tensor([[1, 0], [-1, -1]]),
        None,
        torch.tensor([[4.0, 0.0], [6.0, -6.0]]),
        2,
        routed_scaling_factor=0.5,
        shared_gate_logits=torch.tensor([[0.0], [math.log(2)]], dtype=torch.float64),
    )
    want = torch.tensor([[0.5 * 12 + 2, 1.0], [4.0, -4.0]], dtype=torch.float64)
    assert (got - want).abs().max() < 1e-15  # sigmoid(ln 2) is 2/3


# Hidden sizes: vectors, and no multiple of one.
@on_devices
@dtypes
@pytest.mark.parametrize("float_gate", [True, False], ids=["gate32", "gate-like-rows"])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, None], ids=["w32", "w16", "unit"])
def test_values(device, dtype, float_gate, weight_dtype):
    for hidden, top_k in ((512, 8), (515, 3), (37, 1)):
        inputs = make(
            9,
            top_k,
            hidden,
            padded=hidden + 5,
            device=device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            gate=F32 if float_gate else dtype,
            factor=2.5,
        )
        got = inputs.run()
        assert_matches_oracle(got, inputs)
        column = replace(inputs, gate=inputs.gate[:, None])
        assert_same_bits(column.run(), got)
        assert_same_bits(column.run(out=torch.empty_like(got)), got)


@on_devices
@dtypes
def test_gates_that_are_exact(device, dtype):
    inf, nan = float("inf"), float("nan")
    inputs = make(6, 4, 40, device=device, dtype=dtype)
    logits = torch.tensor([inf, 200.0, 0.0, -inf, nan, -200.0], device=device)
    for gate in (logits, logits.to(dtype)):
        got = replace(inputs, gate=gate).run()
        open_ = inputs.run()
        assert_same_bits(got[:2], open_[:2])  # a gate of 1 is no gate
        half = replace(inputs, shared=inputs.shared / 2).run()
        assert_same_bits(got[2], half[2])
        shut = replace(inputs, shared=inputs.shared * 0).run()
        assert torch.equal(got[[3, 5]], shut[[3, 5]])  # but for the sign of zeros
        assert got[4].isnan().all()


@on_devices
@dtypes
def test_a_token_without_rows_gets_the_rounded_product(device, dtype):
    inputs = make(5, 4, 72, device=device, dtype=dtype, gate=F32, factor=2.5)
    idx = torch.full_like(inputs.idx, -1)
    inputs = replace(inputs, idx=idx, weights=torch.full_like(inputs.weights, float("nan")))
    # The gate itself: that of a shared row of ones, in float32.
    ones = torch.ones(5, 72, device=device)
    gate = replace(inputs, shared=ones, gemm2_out=inputs.gemm2_out.float()).run()
    want = (gate * inputs.shared.float()).to(dtype)
    assert_same_bits(inputs.run(), want)
    minus_zero = torch.full_like(inputs.shared, -0.0)
    assert_same_bits(replace(inputs, shared=minus_zero).run(), torch.zeros_like(minus_zero))


@on_devices
def test_zero_tokens(device):
    inputs = make(0, 8, 16, device=device, gate=F32)
    assert inputs.run().shape == (0, 16)


@pytest.mark.parametrize("column", [False, True])
def test_gradcheck_of_the_gates_backward(column):
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.randn(4, generator=generator, dtype=torch.float64)
    logits = (logits[:, None] if column else logits).clone().requires_grad_()

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shared, logits):
            ctx.save_for_backward(shared, logits)
            return torch.sigmoid(logits.reshape(-1, 1)) * shared

        @staticmethod
        def backward(ctx, grad):
            return gate_backward(grad, *ctx.saved_tensors, (True, True))

    assert torch.autograd.gradcheck(Gate.apply, (shared, logits))


@on_devices
@dtypes
@pytest.mark.parametrize("needs", ["gemm2_out", "weights", "shared", "gate"])
def test_gradients_equal_the_oracles(device, dtype, needs):
    hidden = 24
    i = make(6, 4, hidden, padded=32, device=device, dtype=dtype, gate=F32, factor=2.5)
    upstream = torch.randn(6, hidden, device=device)
    x = getattr(i, needs).clone().requires_grad_()
    (replace(i, **{needs: x}).run().float() * upstream).sum().backward()
    y = getattr(i, needs).double().requires_grad_()
    (replace(i, **{needs: y}).oracle() * upstream.to(dtype).double()).sum().backward()
    # A rounding for each of float32's terms, of which a gate's and a weight's gradient have one a
    # column, at most two operations each; then the result's own.
    largest = max(float(t.nan_to_num().abs().max()) for t in (i.gemm2_out, i.shared))
    terms = 2.5 * largest * upstream.abs().double().max() * hidden
    unit = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[x.dtype]
    allowed = y.grad.abs() * unit + (hidden + 6) * 2**-24 * terms
    wrong = ~((x.grad.double() - y.grad).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} gradients of {needs} are off"
    assert x.grad.abs().sum() > 0


def test_a_gradient_of_the_gate_alone_is_not_lost():
    i = make(3, 4, 16, dtype=F32, gate=F32)
    wanted = replace(i, gate=i.gate.clone().requires_grad_())
    assert wanted.run().requires_grad
    with pytest.raises(RuntimeError, match="out= does not support gradients"):
        wanted.run(out=torch.empty(3, 16))


@on_devices
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "unit"])
def test_opcheck(device, weights):
    i = make(3, 4, 24, device=device, dtype=F32, gate=F32, weight_dtype=F32 if weights else None)
    g = torch.where(i.gemm2_out.isnan(), 0, i.gemm2_out)
    w = i.weights.requires_grad_() if weights else None
    tensors = [g.requires_grad_(), i.idx, w, i.shared.requires_grad_()]
    torch.library.opcheck(OP, (*tensors, 4, None, 2.5, None, i.gate.requires_grad_()))
    detached = [None if x is None else x.detach() for x in (*tensors, i.gate)]
    out = torch.empty(3, 24, device=device)
    torch.library.opcheck(OUT_OP, (*detached[:4], 4, None, 2.5, detached[4], out))


@on_devices
def test_torch_compile_fullgraph(device):
    torch._dynamo.reset()

    def layer(gemm2_out, idx, shared, logits):
        routed = moe_finalize_fuse_shared(
            gemm2_out, idx, None, shared, 8, shared_gate_logits=logits.squeeze(-1)
        )
        return routed + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for num_tokens in (5, 9, 2):
        i = make(num_tokens, 8, 64, device=device, gate=F32, weight_dtype=None)
        args = (i.gemm2_out, i.idx, i.shared, i.gate[:, None])
        torch.testing.assert_close(compiled(*args), layer(*args), rtol=2**-8, atol=2**-8)
