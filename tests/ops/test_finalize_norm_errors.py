# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One test an error of the finalize-norm ops: its kind, its text, and that nothing was written."""

from dataclasses import replace

import pytest
import torch

from tests.ops.finalize_cases import DEVICES
from tests.ops.finalize_norm_cases import BF16, F32, make

on_devices = pytest.mark.parametrize("device", DEVICES)
FP8 = torch.float8_e4m3fn


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def bad_inputs(device):
    """name -> (inputs, kind, text)"""
    good = make(4, 8, 32, padded=40, device=device)

    def change(**kwargs):
        return replace(good, **kwargs)

    residual, weight = good.residual, good.norm_weight
    wide = torch.zeros(4, 24577, dtype=BF16, device=device)
    return {
        # What the plain finalize checks too is checked by the same code: one of each kind here.
        "gemm2 fp64": (change(gemm2_out=good.gemm2_out.double()), TypeError, "gemm2_out: expected"),
        "idx int64": (change(idx=good.idx.long()), TypeError, "permuted_idx: expected int32"),
        "weights flat": (change(weights=good.weights.view(-1)), ValueError, "expert_weights: exp"),
        "top_k 65": (change(top_k=65), ValueError, "top_k: expected 1 to 64, got 65"),
        "shared rows": (change(shared=good.shared[:3]), ValueError, r"shared_output: expected \[4"),
        "gate alone": (
            change(shared=None, gate=torch.zeros(4, device=device)),
            ValueError,
            "shared_gate_logits: expected a shared_output",
        ),
        "residual dtype": (change(residual=residual.float()), TypeError, "residual: expected bf"),
        "residual 1-D": (change(residual=residual[0]), ValueError, "residual: expected"),
        "residual rows": (change(residual=residual[:3]), ValueError, r"residual: expected \[4, 32"),
        "residual columns": (
            change(residual=strided(residual)),
            ValueError,
            "residual: expected adjacent columns",
        ),
        "residual wide": (
            change(residual=torch.zeros(4, 41, dtype=BF16, device=device)),
            ValueError,
            "residual: expected a width of 1 to 40",
        ),
        "residual too wide": (
            change(gemm2_out=wide, residual=wide, shared=None, idx=good.idx.clamp(max=0)),
            ValueError,
            "residual: expected a width of at most 24576, got 24577; take moe_finalize",
        ),
        "weight dtype": (change(norm_weight=weight.float()), TypeError, "weight: expected bfloat"),
        "weight 2-D": (change(norm_weight=weight[None]), ValueError, r"weight: expected \[32\]"),
        "weight short": (change(norm_weight=weight[:31]), ValueError, r"weight: expected \[32\]"),
        "weight strided": (change(norm_weight=strided(weight)), ValueError, "weight: expected a c"),
        "eps 0": (change(eps=0.0), ValueError, "eps: expected a positive number, got 0"),
        "eps tiny": (change(eps=1e-60), ValueError, "eps: expected a positive number"),
        "eps negative": (change(eps=-1e-6), ValueError, "eps: expected a positive number"),
        "eps nan": (change(eps=float("nan")), ValueError, "eps: expected a positive number"),
        "eps infinite": (change(eps=float("inf")), ValueError, "eps: expected a positive number"),
        "eps int": (change(eps=1), TypeError, "eps: expected a float, got int"),
        "residual none": (change(residual=None), TypeError, "residual: expected a Tensor, got No"),
        "weight none": (change(norm_weight=None), TypeError, "weight: expected a Tensor, got Non"),
        "factor": (change(factor=torch.ones(1)), TypeError, "routed_scaling_factor: expected a fl"),
    }


@on_devices
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("name", bad_inputs("cpu"))
def test_bad_input(device, name, fp8):
    inputs, kind, text = bad_inputs(device)[name]
    with pytest.raises(kind, match=text):
        inputs.run(fp8)
    residual_out = torch.full((4, 32), 7.0, dtype=BF16, device=device)
    with pytest.raises(kind, match=text.split(":")[0]):
        inputs.run(fp8, residual_out=residual_out)
    assert (residual_out == 7).all()


def bad_outputs(device):
    """name -> (fp8, given outputs, kind, text)"""

    def empty(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device=device)

    one_row = empty(1, 32)
    return {
        "out dtype": (False, {"out": empty(4, 32, dtype=F32)}, TypeError, "out: expected bfloat16"),
        "out fp8": (False, {"out": empty(4, 32, dtype=FP8)}, TypeError, "out: expected bfloat16"),
        "out shape": (False, {"out": empty(4, 33)}, ValueError, r"out: expected \[4, 32\]"),
        "out kind": (False, {"out": 1}, TypeError, "out: expected a Tensor or None, got int"),
        "out overlaps itself": (
            False,
            {"out": one_row.expand(4, 32)},
            ValueError,
            "out: expected rows that do not overlap",
        ),
        "residual_out rows": (
            False,
            {"residual_out": empty(5, 32)},
            ValueError,
            r"residual_out: expected \[4, 32\], got \[5, 32\]",
        ),
        "residual_out dtype": (
            False,
            {"residual_out": empty(4, 32, dtype=F32)},
            TypeError,
            "residual_out: expected bfloat16",
        ),
        "residual_out overlaps itself": (
            False,
            {"residual_out": one_row.expand(4, 32)},
            ValueError,
            "residual_out: expected rows that do not overlap",
        ),
        "fp8 out dtype": (True, {"out": empty(4, 32)}, TypeError, "out: expected float8_e4m3fn, g"),
        "fp8 out shape": (
            True,
            {"out": empty(4, 31, dtype=FP8)},
            ValueError,
            r"out: expected \[4, 32\], got \[4, 31\]",
        ),
        "scale dtype": (True, {"out_scale": empty(4, 1)}, TypeError, "out_scale: expected float32"),
        "scale shape": (
            True,
            {"out_scale": empty(4, dtype=F32)},
            ValueError,
            r"out_scale: expected \[4, 1\], got \[4\]",
        ),
        "scale strided": (
            True,
            {"out_scale": empty(4, 2, dtype=F32)[:, :1]},
            ValueError,
            "out_scale: expected a contiguous",
        ),
    }


@on_devices
@pytest.mark.parametrize("name", bad_outputs("cpu"))
def test_bad_output(device, name):
    fp8, given, kind, text = bad_outputs(device)[name]
    with pytest.raises(kind, match=text):
        make(4, 8, 32, device=device).run(fp8, **given)


@on_devices
def test_shared_memory_is_refused(device):
    x = make(4, 8, 32, device=device, gate=F32)
    pool = torch.zeros(4 * 32 + 32, dtype=BF16, device=device)
    first, shifted = pool[:128].view(4, 32), pool[32:].view(4, 32)

    def refused(text, inputs=x, fp8=False, **given):
        with pytest.raises(ValueError, match=text):
            inputs.run(fp8, **given)

    refused("out: shares memory with gemm2_out", out=x.gemm2_out[:4, :32])
    refused("residual_out: shares memory with gemm2_out", residual_out=x.gemm2_out[:4, :32])
    refused("out: shares memory with residual; pass another", out=x.residual)
    refused("residual_out: shares memory with shared_output", residual_out=x.shared)
    refused("residual_out: shares memory with out", out=first, residual_out=first)
    refused("residual_out: shares memory with out", out=first, residual_out=shifted)
    refused("out: shares part of its memory with shared", replace(x, shared=first), out=shifted)
    refused(
        "residual_out: shares part of its memory with residual; pass exactly residual",
        replace(x, residual=first),
        residual_out=shifted,
    )
    refused("out: shares memory with weight", replace(x, norm_weight=pool[:32]), out=first)
    gate = torch.zeros(4, device=device)
    refused(
        "out_scale: shares memory with shared_gate_logits",
        replace(x, gate=gate),
        fp8=True,
        out_scale=gate[:, None],
    )
    bytes_of_pool = pool.view(torch.uint8)[:128].view(FP8).view(4, 32)
    refused(
        "out: shares memory with shared_output; pass another",
        replace(x, shared=first),
        fp8=True,
        out=bytes_of_pool,
    )
    scale = torch.zeros(64, device=device)
    refused(
        "out_scale: shares memory with out",
        fp8=True,
        out=scale.view(torch.uint8)[:128].view(FP8).view(4, 32),
        out_scale=scale[:4, None],
    )
    assert not pool.any()
    # FP8 rows are a quarter of float32's: what lies right behind them is not shared.
    both = torch.zeros(4 * 32 + 16, dtype=torch.uint8, device=device)
    x.run(fp8=True, out=both[:128].view(FP8).view(4, 32), out_scale=both[128:].view(F32)[:, None])


def test_an_index_beyond_the_rows_is_refused():
    x = make(4, 8, 32)
    idx = x.idx.clone()
    idx[2, 5] = x.gemm2_out.shape[0]
    with pytest.raises(ValueError, match="permuted_idx: expected indices below 35"):
        replace(x, idx=idx).run()


@pytest.mark.gpu
def test_devices_must_agree():
    x = make(4, 8, 32, device="cuda")
    for name in ("idx", "weights", "shared", "residual", "norm_weight"):
        with pytest.raises(ValueError, match="expected device cuda:0 like"):
            replace(x, **{name: getattr(x, name).cpu()}).run()
    with pytest.raises(ValueError, match="residual_out: expected device cuda:0"):
        x.run(residual_out=torch.empty(4, 32, dtype=BF16))


def test_only_cpu_and_cuda():
    x = make(4, 8, 32)
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
        x.to("meta").run(out=torch.empty(4, 32, dtype=BF16))
