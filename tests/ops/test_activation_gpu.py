# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""silu_and_mul on a GPU, bit for bit against the CPU op."""

import pytest
import torch

from sgl_moe_jit.ops import silu_and_mul
from tests.ops.test_activation import BF16, F16, assert_within, dtypes, gates

pytestmark = pytest.mark.gpu


def assert_same_bits(got, want):
    bits = {2: torch.int16, 4: torch.int32}[want.element_size()]
    got, nan = got.cpu(), want.isnan()
    assert torch.equal(got.isnan(), nan)
    differ = (got.view(bits) != want.view(bits)) & ~nan
    where = differ.nonzero()
    assert where.numel() == 0, (
        f"{want.dtype} {tuple(want.shape)}: {len(where)} differ, first at {where[0].tolist()}: "
        f"got {got[tuple(where[0])]}, expected {want[tuple(where[0])]}"
    )


@dtypes
@pytest.mark.parametrize("width", [1, 7, 8, 96, 2048, 2050])
@pytest.mark.parametrize("rows", [0, 8, 304])
def test_equal_to_the_cpu_op(dtype, width, rows, monkeypatch):
    x = gates(dtype, rows, width)
    if rows:
        x[0, 0], x[1, 0], x[2, 0] = float("inf"), float("-inf"), float("nan")
    want = silu_and_mul(x)
    on_gpu = x.cuda()
    for vector in ("1", "0"):
        for pdl in ("1", "0"):
            monkeypatch.setenv("SGL_MOE_JIT_VECTOR", vector)
            monkeypatch.setenv("SGL_MOE_JIT_PDL", pdl)
            assert_same_bits(silu_and_mul(on_gpu), want)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_gate_of_16_bits(dtype):
    gate = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    x = torch.cat((gate, torch.full_like(gate, 1.5)), 1)
    assert_same_bits(silu_and_mul(x.cuda()), silu_and_mul(x))


@dtypes
def test_against_float64(dtype):
    x = gates(dtype, 256, 512)
    assert_within(silu_and_mul(x.cuda()).cpu(), x)


@dtypes
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_strided_and_unaligned_rows(dtype, shift):
    base = torch.randn(40, 300).to(dtype)
    assert_same_bits(
        silu_and_mul(base.cuda()[:, shift : shift + 256]),
        silu_and_mul(base[:, shift : shift + 256]),
    )


@dtypes
def test_capture_and_replay(dtype):
    x = torch.randn(64, 512).to(dtype).cuda()
    silu_and_mul(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = silu_and_mul(x)
    fresh = torch.randn(64, 512).to(dtype)
    x.copy_(fresh)
    graph.replay()
    assert_same_bits(out, silu_and_mul(fresh))


@dtypes
def test_opcheck(dtype):
    x = torch.randn(16, 64, device="cuda").to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.sgl_moe_jit.silu_and_mul.default, (x,))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
    reason="PDL needs sm_90",
)
@pytest.mark.field_report("M10")
@pytest.mark.field_report("M11")
@dtypes
@pytest.mark.parametrize("width", [64, 35])  # vectors, scalars
def test_nothing_is_read_before_a_late_predecessor_has_written(pdl, dtype, width):
    """The producer lets us start, sleeps, then writes; old data would show in every run."""
    new = torch.randn(20, 2 * width, device="cuda").to(dtype)
    x = new.clone()
    want = silu_and_mul(x)
    consumed = torch.empty_like(want)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(340):  # times three dtypes: 1000 runs a path
        x.fill_(3)
        pdl.produce_late(x, new)
        pdl.consume(consumed, silu_and_mul(x))  # a consumer that waits sees our output
        wrong += (consumed != want).sum()
    assert int(wrong) == 0
    assert_same_bits(want, silu_and_mul(new.cpu()))
