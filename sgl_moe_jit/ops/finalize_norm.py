# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared_add_rmsnorm``: finalize, residual add and RMSNorm in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import check_kinds
from sgl_moe_jit.ops.finalize_norm_kernel import (
    LAST_CPU,
    LAST_CUDA,
    OP,
    OP_FP8,
    NormInputs,
    NormOutputs,
    check_inputs,
    run,
)
from sgl_moe_jit.ops.finalize_norm_schema import new_outputs, write
from sgl_moe_jit.ops.library import can_bypass_dispatcher, refuse_functional_gradients
from sgl_moe_jit.ops.quick_call import QuickWay, never

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # bound once: the look-up costs as much

# The parameters up to the outputs, which differ; top_k is number 7.
_KINDS = "TxtttTTifpn"
_QUICK = QuickWay(never, _KINDS + "oo", (LAST_CUDA[False], {}, LAST_CPU[False]), 7)
_QUICK_FP8 = QuickWay(never, _KINDS + "ooo", (LAST_CUDA[True], {}, LAST_CPU[True]), 7)

# A caller's own out, residual_out and out_scale.
_Given = tuple[Tensor | None, Tensor | None, Tensor | None]


def moe_finalize_fuse_shared_add_rmsnorm(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool | None = None,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``moe_finalize_fuse_shared``, the residual add and the next layer's RMSNorm in one pass.

    ``s[t] = finalize[t] + residual[t]``, ``residual_out = s``, ``out[t] = s[t] /
    sqrt(mean(s[t] ** 2) + eps) * weight``. The finalized row is not rounded and never in memory.

    T tokens, K experts a token, P permuted rows, H hidden size, H_pad >= H.

    Args:
        gemm2_out: [P, H_pad] bfloat16, float16 or float32, as in ``moe_finalize_fuse_shared``.
        expanded_idx_to_permuted_idx: [T, K] or [T * K] int32, as there.
        expert_weights: [T, K] float32, bfloat16 or float16, as there. None: all are 1.
        shared_output: [T, H] like ``gemm2_out``, as there, or None.
        top_k: K, 1 to 64.
        residual: [T, H] like ``gemm2_out``, adjacent columns, any row stride. H is its width, at
            most 24576.
        weight: [H] like ``gemm2_out``, contiguous: of the norm.
        eps: Above 0.
        enable_pdl: Programmatic dependent launch, as there. Same bits.
        routed_scaling_factor: Multiplies the routed sum in float32, before the shared row is added.
        shared_gate_logits: [T] or [T, 1] float32 or like ``gemm2_out``, as there.
        out: [T, H] like ``gemm2_out`` to write into; allocated when None. May be exactly
            ``shared_output`` in eager mode; may share no element with anything else.
        residual_out: The same; may be exactly ``residual`` in eager mode.

    Returns:
        ``(out, residual_out)``, [T, H] like ``gemm2_out``. All in float32, in an order of
        operations that include/sgl_moe_jit/moe/finalize_norm_params.h states, each result rounded
        once: bitwise repeatable, equal on CUDA and CPU and on every path, and independent of the
        batch around the token. What kind of NaN comes of a NaN is the device's.

    Raises:
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes disagree, ``top_k``, ``eps`` or H is out of range, strides or devices do
            not fit, memory overlaps; or an output is an input under tracing.
        RuntimeError: a gradient is asked for: there is none. Or an output is given with gradients
            enabled and an input that requires one, or is an inference tensor outside inference
            mode.
        NotImplementedError: an input has a forward-mode tangent, or a gradient of ``torch.func``.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Cost: ``A * H * (K + 4) + K * (4 + W)`` bytes and ``H * (2K + 6)`` flops a token, A and W the
    item sizes of activations and weights.
    Source: include/sgl_moe_jit/moe/finalize_norm.cuh, csrc/moe/finalize_norm_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_norm.moe_finalize_fuse_shared_add_rmsnorm.
    """
    if not _is_dynamo_compiling():
        served: tuple[Tensor, Tensor] | None = _QUICK.call(
            gemm2_out,
            expanded_idx_to_permuted_idx,
            expert_weights,
            shared_output,
            shared_gate_logits,
            residual,
            weight,
            top_k,
            eps,
            enable_pdl,
            routed_scaling_factor,
            out,
            residual_out,
        )
        if served is not None:
            return served
    inputs = NormInputs(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        residual,
        weight,
    )
    given = (out, residual_out, None)
    written = _call(OP, inputs, top_k, eps, enable_pdl, routed_scaling_factor, given)
    return written.out, written.residual_out


def moe_finalize_fuse_shared_add_rmsnorm_fp8(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool | None = None,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``moe_finalize_fuse_shared_add_rmsnorm``, its result quantised to FP8 with a scale a token.

    With n the normalised row in float32: ``out_scale[t] = max(abs(n[t])) / 448`` (1 for a row of
    zeros, at least 2^-126) and ``out[t] = n[t] * (1 / out_scale[t])`` in float8_e4m3fn, rounded to
    nearest even and saturating at +-448; ``out.float() * out_scale`` is n but for that rounding.
    NaN takes no part in the maximum and stays NaN (0x7f). An infinite n makes its row's scale
    infinite: infinite values become NaN and finite ones 0, and all are NaN when scaled back.

    Arguments as in ``moe_finalize_fuse_shared_add_rmsnorm``, but ``out`` is [T, H] float8_e4m3fn
    and may overlap no input at all, and ``out_scale`` is [T, 1] float32, contiguous; both to write
    into, allocated when None.

    Returns:
        ``(out, out_scale, residual_out)``, the same bits as above everywhere.

    Raises: as ``moe_finalize_fuse_shared_add_rmsnorm``.

    Cost: ``H * (A * (K + 3) + 1)`` bytes and ``H * (2K + 8)`` flops a token and a few a slot.
    Source: include/sgl_moe_jit/moe/finalize_norm.cuh, csrc/moe/finalize_norm_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_norm.moe_finalize_fuse_shared_add_rmsnorm_fp8.
    """
    if not _is_dynamo_compiling():
        served: tuple[Tensor, Tensor, Tensor] | None = _QUICK_FP8.call(
            gemm2_out,
            expanded_idx_to_permuted_idx,
            expert_weights,
            shared_output,
            shared_gate_logits,
            residual,
            weight,
            top_k,
            eps,
            enable_pdl,
            routed_scaling_factor,
            out,
            out_scale,
            residual_out,
        )
        if served is not None:
            return served
    inputs = NormInputs(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        residual,
        weight,
    )
    given = (out, residual_out, out_scale)
    written = _call(OP_FP8, inputs, top_k, eps, enable_pdl, routed_scaling_factor, given)
    assert written.out_scale is not None
    return written.out, written.out_scale, written.residual_out


def _call(
    op: str,
    inputs: NormInputs,
    top_k: int,
    eps: float,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    given: _Given,
) -> NormOutputs:
    """Run an op into the outputs ``given`` and new ones in place of those that are None."""
    check_kinds(*inputs[:5], top_k, enable_pdl, routed_scaling_factor, None)
    _check_kinds(inputs, eps, given)
    refuse_functional_gradients(op, *inputs)
    numbers = (top_k, eps, enable_pdl, routed_scaling_factor)
    direct = can_bypass_dispatcher(*inputs, *given)
    fp8 = op == OP_FP8
    if all(x is None for x in given):
        if not direct:
            made = getattr(torch.ops.sgl_moe_jit, op)(*_as_schema(inputs, *numbers))
            return NormOutputs(made[0], made[-1], made[1] if fp8 else None)
        check_inputs(inputs, top_k, eps, routed_scaling_factor)
        outputs = new_outputs(inputs.residual, fp8)
        run(outputs, inputs, *numbers)
        return outputs
    if not direct:
        _check_outputs(op, inputs, given)
    if direct:
        check_inputs(inputs, top_k, eps, routed_scaling_factor)
    outputs = new_outputs(inputs.residual, fp8, given)
    if direct:
        write(outputs, inputs, *numbers)
    else:
        written = [x for x in outputs if x is not None]
        getattr(torch.ops.sgl_moe_jit, f"{op}_out")(*_as_schema(inputs, *numbers), *written)
    return outputs


def _as_schema(
    inputs: NormInputs, top_k: int, eps: float, enable_pdl: bool | None, factor: float
) -> tuple[Any, ...]:
    return (
        *inputs[:4],
        top_k,
        inputs.residual,
        inputs.weight,
        eps,
        enable_pdl,
        factor,
        inputs.shared_gate_logits,
    )


def _check_kinds(inputs: NormInputs, eps: object, given: _Given) -> None:
    for name, x in (("residual", inputs.residual), ("weight", inputs.weight)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    if not isinstance(eps, (float, torch.SymFloat)):
        raise TypeError(f"eps: expected a float, got {type(eps).__name__}")
    for name, out in zip(NormOutputs._fields, given, strict=True):
        if not (out is None or isinstance(out, Tensor)):
            raise TypeError(f"{name}: expected a Tensor or None, got {type(out).__name__}")


def _check_outputs(op: str, inputs: NormInputs, given: _Given) -> None:
    """Refuse outputs that a kernel behind the dispatcher would write in vain."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    for name, x in zip(NormOutputs._fields, given, strict=True):
        if x is None:
            continue
        if not torch.compiler.is_compiling() and x.is_neg():
            raise ValueError(f"{name}: expected a plain tensor, got a negated view; pass another")
        if traced and (x is inputs.shared_output or x is inputs.residual):
            raise ValueError(f"{name}: may not be an input while tracing; pass another tensor")
    everything = (*inputs, *given)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in everything):
        raise RuntimeError(
            f"{op}: given outputs do not support gradients, and an input requires one; call it "
            "under torch.no_grad()"
        )
