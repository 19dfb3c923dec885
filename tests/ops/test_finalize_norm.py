# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared_add_rmsnorm and its FP8 form: values, layouts, outputs, determinism."""

import math
from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ops import reference_norm
from tests.ops.finalize_cases import DEVICES
from tests.ops.finalize_norm_cases import (
    BF16,
    F16,
    F32,
    Inputs,
    assert_matches_oracle,
    assert_same_bits,
    make,
)

on_devices = pytest.mark.parametrize("device", DEVICES)
on_both = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])


def test_the_oracle_on_numbers_worked_out_by_hand():
    inputs = Inputs(
        gemm2_out=torch.tensor([[1.0, 2.0], [10.0, 20.0]]),
        idx=torch.tensor([[0, 1], [-1, 1]], dtype=torch.int32),
        weights=torch.tensor([[0.5, 0.25], [float("nan"), 0.1]]),
        shared=torch.tensor([[1.0, -1.0], [0.0, 0.0]]),
        top_k=2,
        residual=torch.tensor([[-8.0, 0.0], [1.0, -8.0]]),
        norm_weight=torch.tensor([2.0, 0.5]),
        eps=7.5,
        factor=2.0,
        gate=torch.tensor([0.0, 3.0]),
    )
    # 2 * (0.5 + 2.5, 1 + 5) + 0.5 * (1, -1) + (-8, 0) = (-1.5, 11.5); 2 * (1, 2) + (1, -8)
    s = torch.tensor([[-1.5, 11.5], [3.0, -4.0]], dtype=torch.float64)
    want = inputs.oracle()
    torch.testing.assert_close(want.residual_out, s, rtol=1e-7, atol=0)
    # mean of squares (9 + 16) / 2 and 7.5 make 20
    row = torch.tensor([6 / math.sqrt(20), -2 / math.sqrt(20)], dtype=torch.float64)
    torch.testing.assert_close(want.out[1], row, rtol=1e-7, atol=0)
    n, scale, _ = inputs.oracle(fp8=True)
    assert scale[1].item() == pytest.approx(6 / math.sqrt(20) / 448)
    torch.testing.assert_close(n.out, want.out)


@on_both
@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, None], ids=["w32", "wb16", "w16", "w1"])
def test_values(device, dtype, weight_dtype, fp8):
    # H: one leaf, a partial leaf, whole vectors; T: alone and more than one.
    for num_tokens, top_k, hidden in ((1, 8, 512), (5, 3, 515), (33, 16, 264), (2, 64, 100)):
        inputs = make(
            num_tokens,
            top_k,
            hidden,
            padded=hidden + 8,
            device=device,
            dtype=dtype,
            weight_dtype=weight_dtype,
            shared=top_k != 3,
            gate={8: dtype, 16: F32}.get(top_k),
            factor=1.0 if top_k == 8 else 2.5,
            eps=1e-5,
        )
        assert_matches_oracle(inputs, inputs.run(fp8), fp8)


@on_both
@on_devices
# 1 to 9: around two leaves. 2880: gpt-oss. 8200: a second block of the tree. 16384, 24576: the
# widest rows of public models, and the limit.
@pytest.mark.parametrize(
    "hidden", [1, 2, 3, 4, 5, 6, 7, 8, 9, 515, 2880, 7168, 8192, 8200, 16384, 24576]
)
def test_widths(device, hidden, fp8):
    inputs = make(3, 8, hidden, device=device)
    assert_matches_oracle(inputs, inputs.run(fp8), fp8)


@on_devices
@pytest.mark.parametrize("hidden", [1, 7, 32, 515, 7168, 8200, 20000])
def test_the_order_of_additions_is_the_documented_tree(device, hidden):
    """Bits, by the definition in finalize_norm_params.h.

    A float64 quotient or root of float32 values, rounded, is the float32 one (53 bits are more than
    2 * 24 + 2); torch's own float32 root is not always the right one.
    """
    inputs = make(2, 1, hidden, device=device, dtype=F32, shared=False, absent=1.0)
    inputs = replace(inputs, norm_weight=torch.ones(hidden, device=device))
    s = inputs.residual.cpu()  # no rows: s is the residual
    leaves = torch.zeros(2, -(-hidden // 8192) * 2048)
    for column in range(hidden):
        # fma: the square is exact in float64, and so is rounded once
        leaf = leaves[:, column // 4]
        leaf.copy_((s[:, column].double() ** 2 + leaf.double()).float())
    total = torch.zeros(2)
    for block in leaves.split(2048, dim=1):
        level = block
        while level.shape[1] > 1:
            level = level[:, 0::2] + level[:, 1::2]
        total = total + level[:, 0]
    mean = (total.double() / hidden).float() + torch.tensor(1e-6)
    inv = (1.0 / mean.double().sqrt().float().double()).float()
    out, residual_out = inputs.run()
    assert_same_bits(residual_out, inputs.residual)
    assert_same_bits(out.cpu(), s * inv[:, None])


@on_both
@on_devices
def test_a_token_alone_has_the_bits_it_has_in_a_batch(device, fp8):
    inputs = make(70, 8, 1032, device=device, gate=F32)
    want = inputs.run(fp8)
    for begin, end in ((0, 1), (13, 14), (3, 40), (69, 70)):
        got = inputs.tokens(begin, end).run(fp8)
        assert_same_bits(got, tuple(x[begin:end] for x in want))
    assert_same_bits(inputs.run(fp8), want)


@on_both
@on_devices
def test_layouts_give_the_same_bits(device, fp8):
    inputs = make(9, 8, 136, padded=144, device=device, gate=BF16)
    want = inputs.run(fp8)
    for name in ("gemm2_out", "idx", "weights", "shared", "residual", "norm_weight", "gate"):
        x = getattr(inputs, name)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape)
        assert_same_bits(replace(inputs, **{name: moved.copy_(x)}).run(fp8), want)
    for name in ("gemm2_out", "shared", "residual"):  # rows further apart than they are wide
        x = getattr(inputs, name)
        wide = torch.full((x.shape[0], x.shape[1] + 5), float("nan"), dtype=x.dtype, device=device)
        wide = wide[:, 2 : x.shape[1] + 2].copy_(x)
        assert_same_bits(replace(inputs, **{name: wide}).run(fp8), want)
    assert_same_bits(replace(inputs, idx=inputs.idx.view(-1)).run(fp8), want)
    assert_same_bits(replace(inputs, gate=inputs.gate[:, None]).run(fp8), want)


@on_devices
@pytest.mark.parametrize("shared", [True, False])
def test_tokens_without_rows(device, shared):
    inputs = make(4, 3, 40, device=device, absent=1.0, shared=shared)
    assert_matches_oracle(inputs, inputs.run())
    if not shared:
        assert_same_bits(inputs.run()[1], inputs.residual)


@on_both
@on_devices
def test_zero_tokens(device, fp8):
    inputs = make(0, 8, 64, device=device)
    got = inputs.run(fp8)
    assert [tuple(x.shape) for x in got] == [(0, 64), *([(0, 1)] if fp8 else []), (0, 64)]
    inputs.run(fp8, out=torch.empty_like(got[0]), residual_out=torch.empty_like(got[-1]))


@on_devices
def test_outputs_may_be_given_and_be_the_inputs(device):
    inputs = make(6, 8, 72, device=device)
    want = inputs.run()
    out, residual_out = torch.empty_like(want[0]), torch.empty_like(want[1])
    got = inputs.run(out=out, residual_out=residual_out)
    assert got[0] is out and got[1] is residual_out
    assert_same_bits(got, want)
    got = inputs.run(residual_out=residual_out.zero_())
    assert got[1] is residual_out
    assert_same_bits(got, want)
    wide = torch.zeros(6, 100, dtype=BF16, device=device)
    inputs.run(out=wide[:, 3:75])
    assert_same_bits(wide[:, 3:75], want[0])
    assert not wide[:, :3].any() and not wide[:, 75:].any()
    shared, residual = inputs.shared.clone(), inputs.residual.clone()
    got = replace(inputs, shared=shared, residual=residual).run(out=shared, residual_out=residual)
    assert got[0] is shared and got[1] is residual
    assert_same_bits(got, want)


@on_devices
def test_fp8_outputs_may_be_given(device):
    inputs = make(6, 8, 72, device=device)
    want = inputs.run(fp8=True)
    given = {
        "out": torch.zeros(6, 72, device=device).to(torch.float8_e4m3fn),
        "out_scale": torch.zeros(6, 1, device=device),
        "residual_out": inputs.residual.clone(),
    }
    got = replace(inputs, residual=given["residual_out"]).run(fp8=True, **given)
    assert all(x is y for x, y in zip(got, given.values(), strict=True))
    assert_same_bits(got, want)
    only_scale = torch.zeros(6, 1, device=device)
    assert inputs.run(fp8=True, out_scale=only_scale)[1] is only_scale
    assert_same_bits(only_scale, want[1])


def fp8_of(row, device, **kwargs):
    """The FP8 form of one token whose sum is ``row``, in float32 and with eps 1e-30."""
    inputs = make(1, 1, len(row), device=device, dtype=F32, shared=False, absent=1.0)
    residual = torch.tensor([row], device=device)
    ones = torch.ones(len(row), device=device)
    inputs = replace(inputs, residual=residual, norm_weight=kwargs.get("weight", ones), eps=1e-30)
    out, scale, _ = inputs.run(fp8=True)
    return out[0].cpu(), scale.item()


@on_devices
def test_fp8_of_special_rows(device):
    out, scale = fp8_of([0.0, -0.0, 0.0], device)  # -0 is added to the +0 of no rows
    assert scale == 1.0 and out.view(torch.uint8).tolist() == [0, 0, 0]
    # The largest value becomes 448. Of the others, 448 * 17 / 256 = 29.75 lies between 28 and 30,
    # and 448 / 256 of the last is 1 / 1100, below half of the smallest subnormal, 2^-9.
    out, scale = fp8_of([256.0, -17.0, 0.0, 256 / 448 / 1100], device)
    assert out.tolist() == [448.0, -30.0, 0.0, 0.0]
    # A NaN in the row makes all of it NaN through the norm, and every NaN is 0x7f.
    out, scale = fp8_of([1.0, float("nan"), -float("nan")], device)
    assert out.view(torch.uint8).tolist() == [0x7F] * 3 and scale == 1.0
    # A NaN of the weight stays by itself and takes no part in the maximum.
    weight = torch.tensor([1.0, float("nan"), 2.0, 1.0], device=device)
    out, scale = fp8_of([1.0, 1.0, 1.0, -1.0], device, weight=weight)
    assert out.view(torch.uint8).tolist()[1] == 0x7F
    assert scale == pytest.approx(2.0 / 448) and out.float()[[0, 2, 3]].tolist() == [224, 448, -224]
    # An infinite value makes the scale infinite, finite ones zero, and itself NaN.
    weight = torch.tensor([1.0, float("inf"), -1.0, -float("inf")], device=device)
    out, scale = fp8_of([1.0, 1.0, 1.0, 1.0], device, weight=weight)
    assert scale == math.inf and out.view(torch.uint8).tolist() == [0, 0x7F, 0x80, 0x7F]
    # So small a maximum that its quotient would have no finite reciprocal.
    weight = torch.full((4,), 1e-37, device=device)
    out, scale = fp8_of([1.0, 1.0, 0.0, -1.0], device, weight=weight)
    assert scale == 2.0**-126 and out.float()[2] == 0
    assert out.float()[0] == pytest.approx(2 / 3**0.5 * 1e-37 * 2.0**126, rel=2**-4)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@on_both
def test_every_instruction_set_gives_the_same_bits(isa, fp8, monkeypatch):
    for num_tokens, hidden, dtype in ((3, 515, BF16), (2, 8200, F32), (5, 136, F16)):
        inputs = make(num_tokens, 3, hidden, dtype=dtype, gate=F32, factor=2.5)
        want = inputs.run(fp8)
        with monkeypatch.context() as patch:
            patch.setenv("SGL_MOE_JIT_CPU_ISA", isa)
            try:
                got = inputs.run(fp8)
            except ValueError as error:
                pytest.skip(str(error))
        assert_same_bits(got, want)


@on_devices
def test_it_is_a_finalize_then_a_norm_but_for_a_rounding(device):
    """The unrounded row in between is why the fused result is nearer to the exact one."""
    from sgl_moe_jit.ops import moe_finalize_fuse_shared

    x = make(40, 8, 512, device=device)
    y = moe_finalize_fuse_shared(x.gemm2_out, x.idx, x.weights, x.shared, 8)
    two_steps = (y.float() + x.residual.float()).to(BF16)
    want = x.oracle()
    error = (two_steps.double() - want.residual_out).abs()
    assert (error > want.residual_allowed).any()
    fused = x.run()[1]
    assert ((fused.double() - want.residual_out).abs() <= want.residual_allowed).all()


def test_the_oracle_has_gradients():
    x = make(3, 2, 8, dtype=F32)
    residual = x.residual.double().requires_grad_()
    replace(x, residual=residual).oracle().out.sum().backward()
    assert residual.grad.abs().sum() > 0
    assert reference_norm.NormReference._fields[:2] == ("out", "residual_out")
