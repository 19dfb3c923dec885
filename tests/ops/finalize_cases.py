# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs and the comparison that every finalize test uses."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_moe_jit.ops import moe_finalize_fuse_shared, reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Inputs:
    gemm2_out: Tensor
    idx: Tensor
    weights: Tensor | None
    shared: Tensor | None
    top_k: int
    factor: float = 1.0
    hidden_dim: int | None = None
    gate: Tensor | None = None

    def run(self, **kwargs) -> Tensor:
        return moe_finalize_fuse_shared(
            self.gemm2_out,
            self.idx,
            self.weights,
            self.shared,
            self.top_k,
            routed_scaling_factor=self.factor,
            shared_gate_logits=self.gate,
            hidden_dim=self.hidden_dim,
            **kwargs,
        )

    def oracle(self, function=reference.moe_finalize_fuse_shared) -> Tensor:
        return function(
            self.gemm2_out,
            self.idx,
            self.weights,
            self.shared,
            self.top_k,
            routed_scaling_factor=self.factor,
            shared_gate_logits=self.gate,
            hidden_dim=self.hidden_dim,
        )

    def tokens(self, begin: int, end: int) -> "Inputs":
        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[begin:end]

        return replace(
            self,
            idx=self.idx.view(-1, self.top_k)[begin:end],
            weights=part(self.weights),
            shared=part(self.shared),
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
    seed=0,
) -> Inputs:
    """Random rows in random order; unreferenced rows and columns >= hidden hold NaN.

    ``weight_dtype`` None: no weights. ``gate``: the dtype of the gate's logits, None for no gate.
    """
    generator = torch.Generator().manual_seed(seed)
    padded = hidden if padded is None else padded
    rows = num_tokens * top_k + 3
    idx = torch.randperm(rows, generator=generator)[: num_tokens * top_k].int()
    idx[torch.rand(num_tokens * top_k, generator=generator) < absent] = -1
    gemm2_out = torch.full((rows, padded), float("nan"), dtype=dtype)
    used = idx[idx >= 0].long()
    gemm2_out[used, :hidden] = torch.randn(len(used), hidden, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    shared_row = torch.randn(num_tokens, hidden, generator=generator).to(dtype) if shared else None
    inputs = Inputs(
        gemm2_out,
        idx.view(num_tokens, top_k),
        None if weight_dtype is None else weights.to(weight_dtype),
        shared_row,
        top_k,
        factor,
        None if shared else hidden,
        None if gate is None else (2 * torch.randn(num_tokens, generator=generator)).to(gate),
    )
    return inputs.to(device)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    different = (bits(got) != bits(want)).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{len(different)} of {got.numel()} elements differ in bits; first at {at}: "
            f"got {got[at].item()!r}, want {want[at].item()!r}"
        )


def assert_matches_oracle(got: Tensor, inputs: Inputs) -> None:
    want = inputs.oracle()
    allowed = inputs.oracle(reference.finalize_tolerance)
    assert got.shape == want.shape, f"got shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == inputs.gemm2_out.dtype
    error = (got.double() - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        at = tuple((error / allowed).nan_to_num(nan=float("inf")).argmax().unsqueeze(0).tolist())
        flat = at[0]
        raise AssertionError(
            f"shape {tuple(got.shape)} {got.dtype}: {int(wrong.sum())} wrong, of them "
            f"{int(got.isnan().sum())} NaN and {int(got.isinf().sum())} Inf; worst at flat {flat}: "
            f"got {got.reshape(-1)[flat].item()!r}, want {want.reshape(-1)[flat].item()!r}, "
            f"allowed error {allowed.reshape(-1)[flat].item():.3g}"
        )
