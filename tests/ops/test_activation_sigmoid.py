# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""math::sigmoid of moe/activation_math.h, which fused gates use: values, ends, the same bits."""

from pathlib import Path

import pytest
import torch

from sgl_moe_jit.jit import load_jit


def inputs() -> torch.Tensor:
    """Every 9973rd float32, NaN apart, and the range where the exponential is neither 0 nor 1."""
    every = torch.arange(-(2**31), 2**31, 9973, dtype=torch.int64).to(torch.int32)
    every = every.view(torch.float32)
    near = torch.linspace(-110, 110, 100_003)
    return torch.cat((every[~every.isnan()], near))


@pytest.fixture(scope="module")
def sigmoid():
    module = load_jit(
        "sigmoid_test",
        cpp_files=[Path(__file__).with_suffix(".h")],
        cpp_wrappers=[("sigmoid", "sigmoid_test::sigmoid")],
    )

    def call(x: torch.Tensor, isa: int = 0) -> torch.Tensor | None:
        out = torch.full_like(x, float("nan"))
        return out if module.sigmoid(out, x, isa) else None

    return call


def test_against_float64(sigmoid):
    x = inputs()
    want = torch.sigmoid(x.double())
    # An exponential good to 2 units in the last place, a sum, a quotient and a product; where the
    # exponential is subnormal its error is absolute.
    allowed = (4 + 1 + 1 + 1) * 2.0**-24 * want + 2.0**-148
    share = (sigmoid(x).double() - want).abs() / allowed
    assert share.max() <= 1, (x[share.argmax()], share.max())


def test_the_ends_and_nan(sigmoid):
    inf, nan = float("inf"), float("nan")
    got = sigmoid(torch.tensor([inf, -inf, 0.0, -0.0, 200.0, -200.0]))
    assert got.tolist() == [1.0, 0.0, 0.5, 0.5, 1.0, 0.0]
    assert sigmoid(torch.tensor([nan, -nan])).isnan().all()


def test_every_instruction_set_gives_the_same_bits(sigmoid):
    x = inputs()
    results = [sigmoid(x, isa) for isa in (0, 1, 2)]
    for other in (result for result in results[1:] if result is not None):
        assert torch.equal(other.view(torch.int32), results[0].view(torch.int32))


@pytest.fixture(scope="module")
def on_cuda():
    return load_jit(
        "sigmoid_test",
        cuda_files=[Path(__file__).with_suffix(".cuh")],
        cuda_wrappers=[
            ("sigmoid", "sigmoid_test::sigmoid"),
            ("reciprocal", "sigmoid_test::reciprocal"),
        ],
    )


@pytest.mark.gpu
def test_cuda_gives_the_same_bits(sigmoid, on_cuda):
    x = inputs()
    on_gpu = x.cuda()
    got = torch.empty_like(on_gpu)
    on_cuda.sigmoid(got, on_gpu)
    assert torch.equal(got.cpu().view(torch.int32), sigmoid(x).view(torch.int32))


@pytest.mark.gpu
def test_the_reciprocal_is_right_for_every_float_from_1_to_2(on_cuda):
    x = torch.arange(0x3F800000, 0x40000001, dtype=torch.int32).view(torch.float32)
    assert x[0] == 1 and x[-1] == 2 and len(x) == 2**23 + 1
    on_gpu = x.cuda()
    got = torch.empty_like(on_gpu)
    on_cuda.reciprocal(got, on_gpu)
    # In float64 the quotient of two floats is never so near a tie that rounding it again errs.
    assert torch.equal(got.cpu(), (1 / x.double()).float())
