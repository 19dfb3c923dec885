# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared and its oracle on numbers worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.ops import moe_finalize_fuse_shared
from tests.ops.finalize_cases import BF16, DEVICES, F16, F32, Inputs, assert_same_bits, make

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "finalize.json").read_text())
field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
weight_dtypes = pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=["w32", "w16", "wh"])


def vector_inputs(device, dtype, weight_dtype, shared, factor=1.0) -> Inputs:
    rows, width = VECTORS["gemm2_out"]["shape"]
    r = torch.arange(1, rows + 1, dtype=torch.float64)
    nan = torch.full_like(r, float("nan"))
    gemm2_out = torch.stack([r, 2 * r, -r, r / 2, nan, nan], 1).to(dtype)
    assert gemm2_out.shape == (rows, width)
    return Inputs(
        gemm2_out,
        torch.tensor(VECTORS["expanded_idx_to_permuted_idx"], dtype=torch.int32),
        torch.tensor(VECTORS["expert_weights"], dtype=weight_dtype),
        torch.tensor(VECTORS["shared_output"], dtype=dtype) if shared else None,
        VECTORS["top_k"],
        factor,
        None if shared else VECTORS["hidden_dim"],
    ).to(device)


@on_devices
@dtypes
@weight_dtypes
@pytest.mark.parametrize(
    ("key", "shared", "factor"),
    [
        ("expected_with_shared", True, 1.0),
        ("expected_without_shared", False, 1.0),
        ("expected_with_shared_and_routed_scaling_factor_2.5", True, 2.5),
    ],
)
def test_vectors(device, dtype, weight_dtype, key, shared, factor):
    got = vector_inputs(device, dtype, weight_dtype, shared, factor).run()
    assert_same_bits(got, torch.tensor(VECTORS[key], dtype=dtype, device=device))


def test_the_oracle_itself_gives_the_vectors():
    for key, shared, factor in [
        ("expected_with_shared", True, 1.0),
        ("expected_without_shared", False, 1.0),
        ("expected_with_shared_and_routed_scaling_factor_2.5", True, 2.5),
    ]:
        want = torch.tensor(VECTORS[key], dtype=torch.float64)
        assert torch.equal(vector_inputs("cpu", F32, F32, shared, factor).oracle(), want)


@on_devices
@weight_dtypes
@pytest.mark.parametrize("case", VECTORS["accumulation"], ids=["sum", "shared-joins-first"])
def test_accumulates_in_float32_and_rounds_once(device, weight_dtype, case):
    weights = [1.0] + [2**-9] * 63 if case["shared"] is None else [2**-9] * 64
    shared = None if case["shared"] is None else torch.full((1, 8), case["shared"], dtype=BF16)
    inputs = Inputs(
        torch.full((64, 8), case["gemm2_value"], dtype=BF16),
        torch.arange(64, dtype=torch.int32).view(1, 64),
        torch.tensor([weights], dtype=weight_dtype),
        shared,
        64,
    ).to(device)
    assert inputs.run().tolist() == [[case["expected"]] * 8]


@on_devices
@field_report("M4")
def test_zero_weight_does_not_skip(device):
    inputs = vector_inputs(device, BF16, F32, shared=True)
    weights = inputs.weights.clone()
    weights[0, 0] = 0.0
    assert replace(inputs, weights=weights).run().isfinite().all()
    gemm2_out = inputs.gemm2_out.clone()
    gemm2_out[2] = float("inf")  # token 0 refers to row 2: IEEE says 0 * inf = NaN
    got = replace(inputs, weights=weights, gemm2_out=gemm2_out).run()
    assert got[0].isnan().all() and got[1:].isfinite().all()


@on_devices
@field_report("M3")
def test_weight_dtype_is_read_as_labelled(device):
    for dtype in (BF16, F16):
        inputs = make(7, 8, 40, device=device, weight_dtype=dtype)
        wide = replace(inputs, weights=inputs.weights.float())
        assert_same_bits(inputs.run(), wide.run())
    case = VECTORS["mislabelled_weights"]
    right = torch.tensor(case["right"], dtype=BF16)
    assert [hex(b) for b in right.view(torch.int16).tolist()] == case["bits"]
    got = moe_finalize_fuse_shared(
        torch.ones(2, 8, dtype=BF16, device=device),
        torch.tensor([[0, -1], [1, -1]], dtype=torch.int32, device=device),
        torch.stack([right, right.flip(0)]).to(device),
        None,
        2,
    )
    assert got[:, 0].tolist() == case["right"]  # .5 and .25, never .2504807
