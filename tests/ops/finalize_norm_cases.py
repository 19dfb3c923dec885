# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs and comparisons of the tests of finalize with residual add and RMSNorm."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_moe_jit.ops import (
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
    reference_norm,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Inputs:
    gemm2_out: Tensor
    idx: Tensor
    weights: Tensor | None
    shared: Tensor | None
    top_k: int
    residual: Tensor
    norm_weight: Tensor
    eps: float = 1e-6
    factor: float = 1.0
    gate: Tensor | None = None

    def call(self, function, **kwargs):
        return function(
            self.gemm2_out,
            self.idx,
            self.weights,
            self.shared,
            self.top_k,
            self.residual,
            self.norm_weight,
            self.eps,
            routed_scaling_factor=self.factor,
            shared_gate_logits=self.gate,
            **kwargs,
        )

    def run(self, fp8=False, **kwargs):
        if fp8:
            return self.call(moe_finalize_fuse_shared_add_rmsnorm_fp8, **kwargs)
        return self.call(moe_finalize_fuse_shared_add_rmsnorm, **kwargs)

    def oracle(self, fp8=False):
        if fp8:
            return self.call(reference_norm.moe_finalize_fuse_shared_add_rmsnorm_fp8)
        return self.call(reference_norm.moe_finalize_fuse_shared_add_rmsnorm)

    def tokens(self, begin: int, end: int) -> "Inputs":
        def part(x):
            return None if x is None else x[begin:end]

        return replace(
            self,
            idx=self.idx.view(-1, self.top_k)[begin:end],
            weights=part(self.weights),
            shared=part(self.shared),
            residual=self.residual[begin:end],
            gate=part(self.gate),
        )

    def to(self, device: str) -> "Inputs":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make(
    num_tokens,
    top_k,
    hidden,
    *,
    padded=None,
    device="cpu",
    dtype=BF16,
    weight_dtype=F32,
    shared=True,
    gate=None,
    factor=1.0,
    absent=0.2,
    eps=1e-6,
    seed=0,
) -> Inputs:
    """Random rows in random order; unreferenced rows and columns >= hidden hold NaN.

    ``weight_dtype`` None: no weights. ``gate``: the dtype of the gate's logits, None for no gate.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    padded = hidden if padded is None else padded
    rows = num_tokens * top_k + 3
    idx = torch.randperm(rows, generator=generator)[: num_tokens * top_k].int()
    idx[torch.rand(num_tokens * top_k, generator=generator) < absent] = -1
    gemm2_out = torch.full((rows, padded), float("nan"), dtype=dtype)
    used = idx[idx >= 0].long()
    gemm2_out[used, :hidden] = randn(len(used), hidden).to(dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    inputs = Inputs(
        gemm2_out,
        idx.view(num_tokens, top_k),
        None if weight_dtype is None else weights.to(weight_dtype),
        randn(num_tokens, hidden).to(dtype) if shared else None,
        top_k,
        (2 * randn(num_tokens, hidden)).to(dtype),
        (1 + 0.3 * randn(hidden)).to(dtype),
        eps,
        factor,
        None if gate is None else randn(num_tokens).to(gate),
    )
    return inputs.to(device)


def assert_same_bits(got, want) -> None:
    """Compare tensors, or tuples of them, bit for bit; ``got`` may be on another device."""
    if isinstance(got, tuple):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            assert_same_bits(x, y)
        return
    assert got.shape == want.shape and got.dtype == want.dtype
    integer = _INTEGER[got.element_size()]
    got = got.to(want.device)
    different = (got.contiguous().view(integer) != want.contiguous().view(integer)).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{got.dtype} {tuple(got.shape)}: {len(different)} of {got.numel()} elements differ in "
            f"bits; first at {at}: got {got[at].item()!r}, want {want[at].item()!r}"
        )


def assert_close(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> None:
    assert got.shape == want.shape, f"{name}: got shape {tuple(got.shape)}"
    error = (got.double() - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        flat = int((error / allowed).nan_to_num(nan=float("inf")).argmax())
        raise AssertionError(
            f"{name} {tuple(got.shape)} {got.dtype}: {int(wrong.sum())} wrong, of them "
            f"{int(got.isnan().sum())} NaN; worst at flat {flat}: got "
            f"{got.reshape(-1)[flat].item()!r}, want {want.reshape(-1)[flat].item()!r}, allowed "
            f"error {allowed.reshape(-1)[flat].item():.3g}"
        )


def assert_matches_oracle(inputs: Inputs, got, fp8=False) -> None:
    dtype = inputs.gemm2_out.dtype
    if fp8:
        out, scale, residual_out = got
        want, want_scale, scale_allowed = inputs.oracle(fp8=True)
        assert out.dtype == torch.float8_e4m3fn and scale.dtype == F32
        assert_close("out_scale", scale, want_scale, scale_allowed)
        value = out.double() * scale.double()
    else:
        value, residual_out = got
        want = inputs.oracle()
        assert value.dtype == dtype
    assert residual_out.dtype == dtype
    assert_close("residual_out", residual_out, want.residual_out, want.residual_allowed)
    assert_close("out", value, want.out, want.out_allowed)
