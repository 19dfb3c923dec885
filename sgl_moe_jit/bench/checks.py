# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a provider computes what the float64 oracle does, before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.bench.cases import FinalizeInputs
from sgl_moe_jit.bench.contest import WrongResultError
from sgl_moe_jit.bench.timing import Call
from sgl_moe_jit.ops import reference

# Oracles in float64 of more tokens than this would take longer than the measurement.
CHECKED_TOKENS = 64
# Relative size of one rounding to bfloat16.
ROUNDING = 2.0**-8


def compare(name: str, what: str, got: Tensor, want: Tensor, allowed: Tensor) -> None:
    """Compare the first rows of ``got`` with all of ``want``.

    Raises:
        WrongResultError: an element is off by more than is allowed, or any row holds NaN.
    """
    head = got[: want.shape[0]].double()
    error = (head - want).abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        worst = int((error - allowed).nan_to_num(nan=torch.inf).argmax())
        raise WrongResultError(
            f"{name}: {what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst, "
            f"at {worst}: expected {float(want.flatten()[worst]):.6g} within "
            f"{float(allowed.flatten()[worst]):.3g}, got {float(head.flatten()[worst]):.6g}"
        )
    if got.isnan().any():
        raise WrongResultError(f"{name}: {what}: elements were left unwritten")


def head_rows(
    x: FinalizeInputs, top_k: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the oracle's arguments for the first tokens, with only their rows of the pool."""
    n = min(num_tokens, x.out.shape[0])
    idx = x.expanded_idx_to_permuted_idx[:n].reshape(-1)
    present = idx >= 0
    rows = x.gemm2_out[idx.clamp(min=0).long()]
    here = torch.arange(n * top_k, device=rows.device)
    own = torch.where(present, here, torch.full_like(here, -1))
    return rows, own, x.expert_weights[:n], x.shared_output[:n]


def magnitude(rows: Tensor, idx: Tensor, weights: Tensor, shared: Tensor, top_k: int) -> Tensor:
    """Return the sum of the terms' magnitudes, what roundings of partial sums scale with."""
    return reference.moe_finalize_fuse_shared(rows.abs(), idx, weights.abs(), shared.abs(), top_k)


def check_provider(name: str, call: Call, inputs: FinalizeInputs, top_k: int) -> None:
    """Compare a finalize with the oracle on the first tokens.

    Allowed is three roundings of bfloat16, since peers may round the routed sum before the add.

    Raises:
        WrongResultError: it is wrong.
    """
    inputs.out.fill_(float("nan"))
    call()
    head = head_rows(inputs, top_k, CHECKED_TOKENS)
    want = reference.moe_finalize_fuse_shared(*head, top_k)
    compare(name, "out", inputs.out, want, 3 * ROUNDING * magnitude(*head, top_k))
