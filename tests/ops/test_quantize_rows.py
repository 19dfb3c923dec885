# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Rows in float8_e4m3fn against its definition, at every scale and at the edges."""

import pytest
import torch

from sgl_moe_jit.ops.quantize_rows import quantize_rows
from tests.moe.fp8_cases import TABLE, model_quantize, round_to_e4m3
from tests.moe.runner_cases import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)


def test_the_model_of_e4m3():
    assert TABLE[:10].tolist() == [i / 512 for i in range(10)]  # 8 of them subnormal
    assert TABLE[-2:].tolist() == [416.0, 448.0]
    assert torch.equal(
        TABLE, torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    )
    ties = torch.tensor([17.0, 19.0, -17.0, 3 * 2.0**-10, 2.0**-10], dtype=torch.float64)
    assert round_to_e4m3(ties).tolist() == [16.0, 20.0, -16.0, 2.0**-8, 0.0]


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_to_the_model(device, dtype):
    x = torch.randn(64, 96, device=device) * torch.logspace(-30, 30, 64, device=device)[:, None]
    if dtype == torch.float16:
        x = torch.randn(64, 96, device=device) * torch.logspace(-6, 4, 64, device=device)[:, None]
    x[3] = 0
    x[4, 1:] = 0
    values, scales = quantize_rows(x.to(dtype))
    want, want_scales = model_quantize(x.to(dtype))
    assert torch.equal(scales.double(), want_scales)
    assert torch.equal(values.double(), want)
    # A row alone is the row in the batch.
    assert torch.equal(quantize_rows(x[7:8].to(dtype)).values.double(), want[7:8])


@on_devices
def test_no_finite_row_becomes_nan(device):
    """Each positive bfloat16 as the largest of a row, subnormals included."""
    largest = torch.arange(1, 0x7F80, dtype=torch.int16, device=device).view(torch.bfloat16)
    values, scales = quantize_rows(largest[:, None])
    got, scale = values.double()[:, 0], scales.double()
    assert got.isfinite().all() and scale.isfinite().all()
    normal = scale > 2.0**-126
    assert (got[normal] == 448).all() and int(normal.sum()) > 30000
    error = (got * scale - largest.double()).abs()
    assert (error <= (2.0**-4 * largest.double()).clamp(min=2.0**-136)).all()


@on_devices
def test_what_is_not_finite_stays_in_its_row(device):
    x = torch.randn(4, 32, device=device)
    clean = quantize_rows(x)
    x[1, 5], x[2, 6] = float("nan"), float("-inf")
    values, scales = quantize_rows(x)
    product = values.double() * scales.double()[:, None]
    assert product[1:3].isnan().all()
    for row in (0, 3):
        assert torch.equal(product[row], clean.values[row].double() * clean.scales[row].double())


def test_no_rows():
    values, scales = quantize_rows(torch.empty(0, 32))
    assert values.shape == (0, 32) and scales.shape == (0,)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
