# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""PDL of the finalize-norm kernels: nothing is read before a predecessor has written it."""

import pytest
import torch

from tests.ops.finalize_norm_cases import F32, assert_same_bits, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
        reason="PDL needs sm_90",
    ),
]

# On 132 multiprocessors csrc/moe/finalize_norm.cu takes, in this order, Tiny, Few, Small, Pair and
# Narrow; Many, Block, Spread, Odd and Scalar. (Odd and Scalar are Wide's kernel.)
PATHS = [(2, 2048), (20, 2048), (30, 2048), (70, 2048), (210, 2048)]
PATHS += [(190, 4104), (280, 4104), (280, 7176), (2, 516), (2, 515)]
INPUTS = ("gemm2_out", "idx", "weights", "shared", "gate", "residual", "norm_weight")
RUNS = 145  # times seven inputs: 1000 runs a path


@pytest.mark.field_report("M10")
@pytest.mark.parametrize("late", INPUTS)
@pytest.mark.parametrize(("num_tokens", "hidden"), PATHS)
def test_nothing_is_read_before_a_late_predecessor_has_written(pdl, late, num_tokens, hidden):
    """The producer lets us start, sleeps, then writes; old data would show in every run."""
    inputs = make(num_tokens, 2, hidden, device="cuda", absent=0.0, gate=F32)
    x = getattr(inputs, late)
    new = x.clone()
    # idx gets other valid rows, so that a stale read is no fault.
    old = x.flip(0).contiguous() if late in ("idx", "weights", "gate") else x * 0 + 3
    want = inputs.run(enable_pdl=False)
    out, residual_out = (torch.empty_like(y) for y in want)
    consumed = torch.empty_like(out)
    for _ in range(RUNS):
        x.copy_(old)
        out.fill_(float("nan"))
        residual_out.fill_(float("nan"))
        pdl.produce_late(x, new)
        inputs.run(enable_pdl=True, out=out, residual_out=residual_out)
        pdl.consume(consumed, out)  # M11: a consumer that waits sees our output
        assert_same_bits((consumed, residual_out), want)


@pytest.mark.field_report("M10")
@pytest.mark.parametrize(("num_tokens", "hidden"), PATHS)
def test_fp8_waits_too(pdl, num_tokens, hidden):
    inputs = make(num_tokens, 2, hidden, device="cuda", absent=0.0)
    new = inputs.residual.clone()
    want = inputs.run(fp8=True, enable_pdl=False)
    scale = torch.empty_like(want[1])
    consumed = torch.empty_like(scale)
    for _ in range(RUNS):
        inputs.residual.fill_(3.0)
        pdl.produce_late(inputs.residual, new)
        got = inputs.run(fp8=True, enable_pdl=True, out_scale=scale)
        pdl.consume(consumed, scale)
        assert_same_bits((got[0], consumed, got[2]), want)
