# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of torch.func are refused by name, and integers that fit no 64 bits as well."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops import (
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
    moe_permute,
)
from sgl_moe_jit.ops.activation import silu_and_mul
from tests.ops.finalize_cases import F32, make

GOOD = make(3, 4, 16, dtype=F32, gate=F32)
IDS = torch.zeros(3, 2, dtype=torch.int32)
NORM = (GOOD.idx, GOOD.weights, GOOD.shared, 4, torch.ones(3, 16), torch.ones(16), 1e-6)
OPS = {
    "moe_finalize_fuse_shared": lambda x: replace(GOOD, gemm2_out=x).run(),
    "moe_finalize_fuse_shared_add_rmsnorm": lambda x: moe_finalize_fuse_shared_add_rmsnorm(
        x, *NORM
    )[0],
    "moe_finalize_fuse_shared_add_rmsnorm_fp8": lambda x: moe_finalize_fuse_shared_add_rmsnorm_fp8(
        x, *NORM
    )[2],
    "moe_permute": lambda x: moe_permute(x[:3], IDS, 2)[0],
    "silu_and_mul": silu_and_mul,
}
X = GOOD.gemm2_out.nan_to_num()


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_of_torch_func_is_refused_by_name(op):
    call = OPS[op]
    match = rf"^{op}: has no gradient under torch\.func .*use torch\.autograd\.grad or \.backward"
    for transform in (
        lambda: torch.func.grad(lambda x: call(x).sum())(X),
        lambda: torch.func.vjp(call, X),
        lambda: torch.func.jacrev(call)(X),
        lambda: torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(torch.stack([X, X])),
    ):
        with pytest.raises(NotImplementedError, match=match):
            transform()


def test_what_vmap_covers_is_seen():
    def loss(x):
        return torch.func.vmap(lambda s: replace(GOOD, shared=s * x.sum()).run())(
            GOOD.shared[None]
        ).sum()

    with pytest.raises(NotImplementedError, match="has no gradient under torch"):
        torch.func.grad(loss)(X)


@pytest.mark.parametrize("op", OPS)
def test_where_no_gradient_is_asked_for_the_op_runs(op):
    call = OPS[op]

    def unwanted(x):
        with torch.no_grad():
            inside = call(x)
        return (inside.float().detach() * x.sum()).sum() + call(x.detach()).float().sum() * 0

    got = torch.func.grad(unwanted)(X)
    assert torch.equal(got, torch.full_like(X, float(call(X).float().sum())))
    scale = torch.ones(())
    other = torch.func.grad(lambda s: (call(X).float() * s).sum())(scale)  # X is a constant there
    torch.testing.assert_close(other, call(X).float().sum())


HUGE = 2**70


@pytest.mark.parametrize(
    ("number", "bits"),  # with the sign
    [(HUGE, 72), (-HUGE, 71), (2**63, 65), (10**5000, 16611)],
    ids=["+", "-", "next", "unprintable"],
)
@pytest.mark.parametrize("needs_grad", [False, True])  # through the dispatcher
def test_integers_beyond_64_bits(number, bits, needs_grad):
    x = X.clone().requires_grad_(needs_grad)
    i = replace(GOOD, gemm2_out=x, shared=None, gate=None)
    got = f"got an int of {bits} bits$"
    with pytest.raises(ValueError, match=f"^top_k: expected 1 to 64, {got}"):
        replace(i, top_k=number).run()
    with pytest.raises(ValueError, match=f"^hidden_dim: expected at most the width .*, {got}"):
        replace(i, hidden_dim=number).run()
    with pytest.raises(ValueError, match=f"^routed_scaling_factor: expected a float, .*, {got}"):
        replace(i, factor=number).run()
    with pytest.raises(ValueError, match=f"^top_k: expected 1 to 64, {got}"):
        moe_finalize_fuse_shared_add_rmsnorm(x, *NORM[:3], number, *NORM[4:])
    with pytest.raises(ValueError, match=f"^num_experts: expected 1 to 4096, {got}"):
        moe_permute(x[:3], IDS, number)
    with pytest.raises(ValueError, match=f"^alignment: expected 1 to 1024, {got}"):
        moe_permute(x[:3], IDS, 2, alignment=number)
    with pytest.raises(ValueError, match=f"^routed_scaling_factor: expected a float, .*, {got}"):
        StandardTopKOutput(GOOD.weights, GOOD.idx, number)
    output = DeferredFinalizeOutput(x, GOOD.weights, GOOD.idx, number)
    with pytest.raises(ValueError, match=f"^top_k: expected 1 to 64, {got}"):
        output.finalize()


def test_integers_at_the_ends_of_64_bits_reach_the_check_of_their_range():
    for number in (2**63 - 1, -(2**63), 65):
        with pytest.raises(ValueError, match=f"^top_k: expected 1 to 64, got {number}$"):
            replace(GOOD, top_k=number).run()
    assert torch.equal(replace(GOOD, factor=2).run(), replace(GOOD, factor=2.0).run())
