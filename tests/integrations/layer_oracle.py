# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A transformers MoE block's output in float64, and how far bfloat16 may be from it.

Every stage that stores bfloat16 rounds: an error spread evenly over at most u = 2**-8 of the value
to both sides, so of variance u**2 / 3 of its square. Errors of different elements are independent,
so variances add up, through a matrix with its squares. GEMMs accumulate in float32, where n
roundings of 2**-24 add up likewise. Six standard deviations are allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-8


def _rounded(x: Tensor, variance: Tensor) -> Tensor:
    """Return the variance of ``x`` once it is stored as bfloat16."""
    return variance + U**2 / 3 * x.square()


def _product(x: Tensor, variance: Tensor | None, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x @ matrix.T``, stored as bfloat16, and its variance. None: ``x`` is exact."""
    walk = x.shape[-1] * 2.0**-48 * x.square()
    y = x @ matrix.T
    return y, _rounded(y, (walk if variance is None else variance + walk) @ matrix.square().T)


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return an expert's output for exact rows, and its variance."""
    g, vg = _product(x, None, gate)
    u, vu = _product(x, None, up)
    s = torch.nn.functional.silu(g)
    vs = _rounded(s, 1.1**2 * vg)  # the slope of SiLU is at most 1.1
    h = s * u
    return _product(h, _rounded(h, vs * u.square() + s.square() * vu), down)


def _mlp(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    names = ("gate_proj", "up_proj", "down_proj")
    return _swiglu(x, *(getattr(module, name).weight.double() for name in names))


@torch.no_grad()
def block_oracle(
    block: torch.nn.Module, x: Tensor, *, deferred: bool = True
) -> tuple[Tensor, Tensor]:
    """Return a stock block's output for ``x`` and the error allowed, in float64, [T, H] both.

    The choice of experts is the block's own router's, so no near tie of it counts as an error.
    What is not deferred rounds the routed sum, and the shared row times its gate, before the add.
    """
    flat = x.reshape(-1, x.shape[-1])
    _, weights, ids = block.gate(flat)
    wide = flat.double()
    y, variance = torch.zeros_like(wide), torch.zeros_like(wide)
    for expert in range(block.experts.num_experts):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = block.experts.gate_up_proj[expert].double().chunk(2)
        rows, of_rows = _swiglu(wide[token], gate, up, block.experts.down_proj[expert].double())
        factor = weights[token, slot].double()[:, None]
        y.index_add_(0, token, factor * rows)
        variance.index_add_(0, token, factor.square() * of_rows)
    if not deferred:
        variance = _rounded(y, variance)
    if hasattr(block, "shared_expert_gate"):
        shared, of_shared = _mlp(block.shared_expert, wide)
        z, of_z = _product(wide, None, block.shared_expert_gate.weight.double())
        share = torch.sigmoid(z)
        of_share = of_z / 16  # the slope of the sigmoid is at most 1/4
        if not deferred:
            of_share = _rounded(share, of_share)
        of_shared = share.square() * of_shared + shared.square() * of_share
        if not deferred:
            of_shared = _rounded(share * shared, of_shared)
        y, variance = y + share * shared, variance + of_shared
    elif hasattr(block, "shared_experts"):
        shared, of_shared = _mlp(block.shared_experts, wide)
        y, variance = y + shared, variance + of_shared
    return y, 6 * _rounded(y, variance).sqrt()


def check_block(got: Tensor, want: Tensor, allowed: Tensor, what: str) -> None:
    """Assert that a bfloat16 block's output lies within the error allowed, which means something.

    Raises:
        AssertionError: it does not, or the error allowed is as large as the output.
    """
    error = (got.reshape(want.shape).double() - want).abs()
    worst = float((error / allowed).max())
    assert worst <= 1, f"{what}: {worst:.3g} of the error allowed"
    size = float(want.square().mean().sqrt())
    assert float(allowed.mean()) < 0.1 * size, f"{what}: {float(allowed.mean()):.3g} of {size:.3g}"
