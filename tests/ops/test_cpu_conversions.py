# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Conversions of host/cpu_kernel.h and cpu_vectors.h against torch's: all values and midpoints."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sgl_moe_jit.jit import load_jit

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
# As numbered in the header: an instruction set each, then registers of two widths, and streamed.
WAYS = pytest.mark.parametrize("way", range(6))


@pytest.fixture(scope="module")
def module():
    return load_jit(
        "conversions_test",
        cpp_files=[Path(__file__).with_suffix(".h")],
        cpp_wrappers=[(f, f"conversions_test::{f}") for f in ("widen", "narrow", "quantise")],
    )


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)


def around_midpoints(values: Tensor) -> Tensor:
    """Ascending values, what lies half way to the next, and float32's neighbours of both."""
    values = values.double()
    exact = torch.cat((values, (values[1:] + values[:-1]) / 2)).float()
    bits = exact.view(torch.int32)
    near = torch.cat((bits, bits + 1, bits - 1)).view(torch.float32)
    near = near[near.isfinite()]
    return torch.cat((near, -near))


def random_floats(count: int = 2**20) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return bits.int().view(torch.float32)


def padded(x: Tensor) -> Tensor:
    """A multiple of 16 elements, the rest specials, aligned as a streaming store wants it."""
    inf, nan = float("inf"), float("nan")
    specials = torch.tensor([inf, -inf, nan, -nan, 0.0, -0.0, 65519.996, 65520.0, 3.4e38, 1e-45])
    x = torch.cat((x, specials))
    return torch.cat((x, x.new_ones(-len(x) % 16)))


def assert_equal_but_nan(got: Tensor, want: Tensor) -> None:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    wrong = (got.view(integer) != want.view(integer)) & ~(got.isnan() & want.isnan())
    at = wrong.nonzero().flatten()
    assert len(at) == 0, f"{len(at)} differ; first at {at[0]}: {got[at[0]]} for {want[at[0]]}"


@HALVES
@WAYS
def test_every_value_to_float32(module, dtype, way):
    x = every(dtype)
    out = torch.full((len(x),), 7.0)
    if not module.widen(out, x, way):
        pytest.skip("this CPU lacks the instruction set")
    assert_equal_but_nan(out, x.float())
    if way:
        first = torch.empty_like(out)
        module.widen(first, x, 0)
        # Quiet or not, the payload is the same.
        quiet = torch.where(out.isnan(), 0x400000, 0).int()
        assert torch.equal(out.view(torch.int32) | quiet, first.view(torch.int32) | quiet)


@HALVES
@WAYS
def test_rounding_at_every_midpoint(module, dtype, way):
    values = every(dtype)
    positive = values[(values.view(torch.int16) >= 0) & values.isfinite()]
    x = padded(torch.cat((around_midpoints(positive), random_floats())))
    out = torch.full((len(x),), 7.0, dtype=dtype)
    if not module.narrow(out, x, way):
        pytest.skip("this CPU lacks the instruction set")
    assert_equal_but_nan(out, x.to(dtype))
    if way:  # NaN too
        first = torch.empty_like(out)
        module.narrow(first, x, 0)
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


@pytest.mark.parametrize("isa", range(3))
def test_float8(module, isa):
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = padded(torch.cat((around_midpoints(values), random_floats())))
    out = torch.empty(len(x), dtype=torch.float8_e4m3fn)
    if not module.quantise(out, x, isa):
        pytest.skip("this CPU lacks the instruction set")
    # torch's conversion does not saturate.
    assert_equal_but_nan(out, x.clamp(-448, 448).to(torch.float8_e4m3fn))
    assert (out.view(torch.uint8)[x.isnan()] == 0x7F).all()
    assert out[x == float("inf")].float().unique().tolist() == [448.0]
