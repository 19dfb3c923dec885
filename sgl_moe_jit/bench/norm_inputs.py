# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of one finalize with residual add and RMSNorm, and where a provider's results are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.bench.cases import FinalizeCase, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.timing import Call

EPS = 1e-6


@dataclass(frozen=True)
class NormInputs:
    """One call's tensors.

    Attributes:
        base: The finalize's; ``base.out`` receives the normalised rows.
        residual: [T, H] bfloat16.
        weight: [H] bfloat16, of the norm.
        residual_out: [T, H] bfloat16, receives the sum.
    """

    base: FinalizeInputs
    residual: Tensor
    weight: Tensor
    residual_out: Tensor


@dataclass(frozen=True)
class NormCall:
    """A provider's call, and where it leaves its results.

    Attributes:
        run: The call.
        out: [T, H] bfloat16, or float8_e4m3fn with a scale.
        residual_out: [T, H] bfloat16.
        scale: [T, 1] float32, or None.
    """

    run: Call
    out: Tensor
    residual_out: Tensor
    scale: Tensor | None = None

    def result(self) -> Tensor:
        """Return the normalised rows, scaled back where they are quantised."""
        return self.out if self.scale is None else self.out.float() * self.scale


# Makes the calls of one shape, one for each set of buffers.
Provider = Callable[[Sequence[NormInputs], int], list[NormCall]]


def make_norm_inputs(
    case: FinalizeCase, num_tokens: int, copies: int, *, device: torch.device | str
) -> list[NormInputs]:
    """Return ``copies`` calls on buffers of their own; only the norm's weights are shared."""
    base = make_finalize_inputs(case, num_tokens, copies, device=device)
    generator = torch.Generator(device=device).manual_seed(1)
    residual = torch.empty(
        copies, num_tokens, case.hidden_dim, dtype=torch.bfloat16, device=device
    ).normal_(generator=generator)
    weight = torch.empty(case.hidden_dim, dtype=torch.bfloat16, device=device)
    weight.uniform_(0.5, 1.5, generator=generator)
    sums = torch.empty_like(residual)
    return [NormInputs(base[i], residual[i], weight, sums[i]) for i in range(copies)]
