# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Oracles of finalize with residual add and RMSNorm, in float64, sharing no code with a kernel.

The bounds follow from float32's unit roundoff u = 2^-24, to first order, times a little: each
intermediate result's relative error is small enough that products of errors are below one part in a
thousand of the bound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_moe_jit.ops.reference import moe_finalize_fuse_shared

_U = 2.0**-24
_SECOND_ORDER = 1 + 2.0**-8
# Relative error of rounding to nearest, and half of the smallest subnormal.
_ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float64: (0.0, 0.0),
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
}


class NormReference(NamedTuple):
    """Values in float64, and how far a right kernel's may lie from them: [T, H] each.

    Attributes:
        out: The normalised rows.
        residual_out: The sums.
        out_allowed: Of ``out``, once rounded.
        residual_allowed: Of ``residual_out``, once rounded.
    """

    out: Tensor
    residual_out: Tensor
    out_allowed: Tensor
    residual_allowed: Tensor


def moe_finalize_fuse_shared_add_rmsnorm(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
) -> NormReference:
    """Return both results of the op and their bounds. ``out`` and ``residual_out`` have gradients.

    Arguments as in :func:`sgl_moe_jit.ops.moe_finalize_fuse_shared_add_rmsnorm`, of any floating
    dtype. ``eps`` counts as the float32 nearest to it, as it does in the kernels.

    The bound of the sum s: one roundoff a term on the sum of the terms' magnitudes, as of the
    finalize, and one for the residual. A gate is off by six roundoffs (reference.py).

    The bound of n = s * inv * weight: the error of s, scaled; and of n the relative error of inv,
    which is half of that of the mean of squares (errors of s through the squares; one roundoff for
    each of the additions that one square goes through, at most 4 in a leaf, 11 in the tree of a
    block, 3 of blocks), and five roundoffs of division by H, eps, root, reciprocal and products.
    """
    options: dict[str, Any] = {
        "routed_scaling_factor": routed_scaling_factor,
        "shared_gate_logits": shared_gate_logits,
        "hidden_dim": residual.shape[1],
    }
    y = moe_finalize_fuse_shared(
        gemm2_out, expanded_idx_to_permuted_idx, expert_weights, shared_output, top_k, **options
    )
    s = y + residual.double()
    eps32 = float(torch.tensor(eps, dtype=torch.float32))
    mean = s.square().mean(-1, keepdim=True)
    n = s / (mean + eps32).sqrt() * weight.double()
    with torch.no_grad():
        options["routed_scaling_factor"] = abs(routed_scaling_factor)
        magnitude = moe_finalize_fuse_shared(
            gemm2_out.abs(),
            expanded_idx_to_permuted_idx,
            None if expert_weights is None else expert_weights.abs(),
            None if shared_output is None else shared_output.abs(),
            top_k,
            **options,
        )
        s_error = (top_k + 2) * _U * magnitude + _U * s.abs()
        if shared_gate_logits is not None:
            s_error = s_error + 6 * _U * magnitude
        squares = 2 * (s.abs() * s_error).mean(-1, keepdim=True) / (mean + eps32)
        additions = 4 + 11 + 3
        relative = squares / 2 + (additions / 2 + 5) * _U
        n_error = s_error / (mean + eps32).sqrt() * weight.double().abs() + relative * n.abs()
        step, smallest = _ROUNDING[residual.dtype]
        return NormReference(
            n,
            s,
            (n_error + step * (n.abs() + n_error) + smallest) * _SECOND_ORDER,
            (s_error + step * (s.abs() + s_error) + smallest) * _SECOND_ORDER,
        )


def moe_finalize_fuse_shared_add_rmsnorm_fp8(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
) -> tuple[NormReference, Tensor, Tensor]:
    """Return the results scaled back from FP8, each row's scale [T, 1], and the scale's bound.

    ``out`` is what ``out.double() * out_scale`` should be: n itself. Its bound is half a step of
    float8_e4m3fn, 2^-4 of the value or 2^-10 of the scale near zero, and n's own error. A value
    whose quotient rounds to a neighbour of the right one is off by no more than that: the bound is
    on the distance to n, not on which neighbour.
    """
    plain = moe_finalize_fuse_shared_add_rmsnorm(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        top_k,
        residual.float(),
        weight,
        eps,
        routed_scaling_factor=routed_scaling_factor,
        shared_gate_logits=shared_gate_logits,
    )
    amax = plain.out.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax / 448).clamp(min=2.0**-126), 1.0)
    error = plain.out_allowed.amax(-1, keepdim=True)
    scale_allowed = (error / 448 + 2 * _U * scale) * _SECOND_ORDER
    step, smallest = _ROUNDING[torch.float8_e4m3fn]
    with torch.no_grad():
        # The quotient is rounded twice more (1 / scale, the product), and multiplied by scale.
        off = plain.out_allowed + 4 * _U * plain.out.abs()
        allowed = off + step * (plain.out.abs() + off) + smallest * (scale + scale_allowed)
    step, smallest = _ROUNDING[residual.dtype]
    s = plain.residual_out
    residual_allowed = plain.residual_allowed + step * s.abs() * _SECOND_ORDER + smallest
    return NormReference(plain.out, s, allowed, residual_allowed), scale, scale_allowed
