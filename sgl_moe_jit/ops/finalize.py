# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared``: weighted un-permute and shared-expert add in one pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

import sgl_moe_jit.ops.finalize_schema  # noqa: F401 - registers the torch ops
from sgl_moe_jit.env import FLAG_CHECK_INDICES, FLAG_PDL, launch_flags
from sgl_moe_jit.ops.finalize_arguments import check_kinds, output_width
from sgl_moe_jit.ops.finalize_kernel import (
    LAST_CPU_KERNEL,
    LAST_GATED_KERNEL,
    LAST_KERNEL,
    OP,
    new_output,
    run,
)
from sgl_moe_jit.ops.library import (
    can_bypass_dispatcher,
    check_writable,
    is_watched_by_function_mode,
    mark_written,
    refuse_functional_gradients,
)
from sgl_moe_jit.ops.quick_call import QuickWay

# Bound once: each look-up on the way to them costs what the call itself does.
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack  # all that make_fx(pre_dispatch=True) shows
_tracing_state = torch._C._get_tracing_state
_is_grad_enabled = torch.is_grad_enabled
_is_inference_mode_enabled = torch.is_inference_mode_enabled
_increment_version = torch._C._increment_version
_BFLOAT16 = torch.bfloat16


def moe_finalize_fuse_shared(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    enable_pdl: bool | None = None,
    *,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    hidden_dim: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Weighted sum of each token's expert rows, plus the shared expert's output, in one pass.

    ``out[t] = gate[t] * shared_output[t] + routed_scaling_factor * sum_k expert_weights[t, k] *
    gemm2_out[idx[t, k]]``, with ``gate[t] = sigmoid(shared_gate_logits[t])``, or 1 without logits.
    A slot with a negative index is skipped: no load, and its weight, NaN included, is ignored. A
    zero weight does not skip: 0 times NaN is NaN.

    T tokens, K experts a token, P permuted rows, H hidden size, H_pad >= H.

    Args:
        gemm2_out: [P, H_pad] bfloat16, float16 or float32, adjacent columns, any row stride below
            4 GB. The second GEMM's output, rows grouped by expert. Rows no slot refers to and
            columns >= H are never read.
        expanded_idx_to_permuted_idx: [T, K] or [T * K] int32, contiguous. Row of ``gemm2_out``;
            negative where there is none. At or above P: ValueError on CPU; on CUDA with
            ``SGL_MOE_JIT_CHECK_INDICES=1``, otherwise undefined.
        expert_weights: [T, K] float32, bfloat16 or float16, contiguous. None: all are 1, as when
            the rows were scaled before; T then comes from the indices.
        shared_output: [T, H] like ``gemm2_out``, adjacent columns, any row stride (0 too), or None.
            Never scaled. Under expert parallelism pass it on one rank a token, or the all-reduce
            adds it once a rank.
        top_k: K, 1 to 64.
        enable_pdl: Programmatic dependent launch. None: where the architecture has it (9.0 and up)
            and ``SGL_MOE_JIT_PDL`` is not off. Same bits.
        routed_scaling_factor: Multiplies the routed sum in float32, before the shared row is added.
        shared_gate_logits: [T] or [T, 1] float32 or like ``gemm2_out``, contiguous: the shared
            expert's gate before its sigmoid (Qwen2-MoE). Needs ``shared_output``.
        hidden_dim: H when there is no shared output; None means H_pad.
        out: [T, H] like ``gemm2_out`` to write into; allocated when None. May be exactly
            ``shared_output`` in eager mode; may share no element with any other input.

    Returns:
        [T, H], dtype of ``gemm2_out``. Accumulated in float32 by fused multiply-add in ascending k,
        rounded once: bitwise repeatable, equal on CUDA and CPU, and independent of the batch around
        the token. A token without rows gets its shared row bit for bit (gated: the rounded
        product, with +0 for -0), or +0. What kind of NaN comes of a NaN is the device's.

    Raises:
        TypeError: a dtype is not listed above, or an argument is of another kind.
        ValueError: shapes disagree, ``top_k`` is out of range, strides or devices do not fit,
            memory overlaps; or ``out`` is ``shared_output`` under tracing.
        RuntimeError: ``out`` with gradients enabled and an input that requires one, or ``out`` is
            an inference tensor outside inference mode.
        NotImplementedError: an input has a forward-mode tangent, or a gradient of ``torch.func``.
        ToolchainError, BuildError: first use only; the kernel could not be compiled.

    Gradients flow to ``gemm2_out``, ``expert_weights``, ``shared_output`` and
    ``shared_gate_logits`` (plain torch backward), not through ``out=``.

    Cost: ``A * H * (K + 2) + K * (4 + W)`` bytes and ``H * (2K + 1)`` flops a token, A and W the
    item sizes of activations and weights.
    Source: include/sgl_moe_jit/moe/finalize.cuh, csrc/moe/finalize_cpu.cc.
    Reference: sgl_moe_jit.ops.reference.moe_finalize_fuse_shared.
    """
    if not _is_dynamo_compiling():
        served: Tensor | None = _QUICK.call(
            gemm2_out,
            expanded_idx_to_permuted_idx,
            expert_weights,
            shared_output,
            shared_gate_logits,
            top_k,
            enable_pdl,
            routed_scaling_factor,
            hidden_dim,
            out,
        )
        if served is not None:
            return served
    return _finalize(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        top_k,
        enable_pdl,
        routed_scaling_factor,
        hidden_dim,
        out,
    )


def _quick_in_python(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    shared_gate_logits: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    hidden_dim: int | None,
    out: Tensor | None,
) -> Tensor | None:
    """The quick way of plain calls on a GPU, as csrc/host/quick_call.cc does it in C.

    Only for bfloat16, of which no complex tensor exists, and so no view with a negation pending.
    What it misses cannot be exported to a kernel (sparse, meta and functorch tensors) or is refused
    there (zeros without memory). None: _finalize looks at it again.
    """
    if (
        not (_dispatch_modes() or _tracing_state())
        and not (_function_modes() and is_watched_by_function_mode())
        and type(gemm2_out) is Tensor
        and type(expanded_idx_to_permuted_idx) is Tensor
        and (expert_weights is None or type(expert_weights) is Tensor)
        and (shared_output is None or type(shared_output) is Tensor)
        and (shared_gate_logits is None or type(shared_gate_logits) is Tensor)
        and (out is None or type(out) is Tensor)
        and type(top_k) is int
        and type(routed_scaling_factor) is float
        and (enable_pdl is None or type(enable_pdl) is bool)
        and (hidden_dim is None or type(hidden_dim) is int)
        and not (
            _is_grad_enabled()
            and (
                gemm2_out.requires_grad
                or (expert_weights is not None and expert_weights.requires_grad)
                or (shared_output is not None and shared_output.requires_grad)
                or (shared_gate_logits is not None and shared_gate_logits.requires_grad)
                or (out is not None and out.requires_grad)
            )
        )
        and forward_ad._current_level < 0
    ):
        kernels = LAST_KERNEL if shared_gate_logits is None else LAST_GATED_KERNEL
        kernel = kernels.get(top_k)
        if (
            kernel is not None
            and gemm2_out.dtype is _BFLOAT16
            and (flags := launch_flags()) < FLAG_CHECK_INDICES
            and (expert_weights is None or not expert_weights.is_neg())
            and (shared_gate_logits is None or not shared_gate_logits.is_neg())
        ):
            if enable_pdl is False:
                flags &= ~FLAG_PDL
            try:
                if out is None:
                    to = new_output(
                        gemm2_out,
                        expanded_idx_to_permuted_idx,
                        expert_weights,
                        shared_output,
                        top_k,
                        hidden_dim,
                    )
                elif (
                    hidden_dim is not None
                    or (shared_output is None and out.shape[-1] != gemm2_out.shape[-1])
                    or (out.is_inference() and not _is_inference_mode_enabled())
                ):
                    return None
                else:
                    to = out
                if kernel.write(
                    to,
                    gemm2_out,
                    expanded_idx_to_permuted_idx,
                    expert_weights,
                    shared_output,
                    shared_gate_logits,
                    top_k,
                    routed_scaling_factor,
                    flags,
                ):
                    if out is not None:
                        _increment_version((out,))  # passes inference tensors by
                    return to
            except Exception:
                pass  # repeated by _finalize, where it fails with its own words or succeeds
    return None


# The parameters of _quick_in_python: kinds, tables, top_k's number, the gate's.
_QUICK = QuickWay(
    _quick_in_python, "TxtttipnIo", (LAST_KERNEL, LAST_GATED_KERNEL, LAST_CPU_KERNEL), 5, 4
)


def _finalize(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    shared_gate_logits: Tensor | None,
    top_k: int,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    hidden_dim: int | None,
    out: Tensor | None,
) -> Tensor:
    """Every call, with every check: what the quick way did not serve."""
    tensors = (
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
    )
    check_kinds(*tensors, top_k, enable_pdl, routed_scaling_factor, hidden_dim)
    if not (out is None or isinstance(out, Tensor)):
        raise TypeError(f"out: expected a Tensor or None, got {type(out).__name__}")
    refuse_functional_gradients(OP, *tensors)
    direct = can_bypass_dispatcher(*tensors, out)
    if out is None:
        if direct:
            return run(None, *tensors, top_k, enable_pdl, routed_scaling_factor, hidden_dim)
        result: Tensor = torch.ops.sgl_moe_jit.moe_finalize_fuse_shared(
            *tensors[:4], top_k, enable_pdl, routed_scaling_factor, hidden_dim, shared_gate_logits
        )
        return result
    width = output_width(gemm2_out, shared_output, hidden_dim)
    if out.dim() == 2 and out.shape[1] != width:  # C++ sees only out's width, and takes it for H
        raise ValueError(f"out: expected width {width}, got {out.shape[1]}")
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError("out: expected a plain tensor, got a negated view; pass another tensor")
    if direct:
        check_writable(out)
        run(out, *tensors, top_k, enable_pdl, routed_scaling_factor, None)
        mark_written(out)
        return out
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if traced and out is shared_output:
        raise ValueError("out: may not be shared_output while tracing; pass another tensor")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, out)):
        raise RuntimeError(
            f"{OP}: out= does not support gradients, and an input requires one; call it without "
            "out=, or under torch.no_grad()"
        )
    torch.ops.sgl_moe_jit.moe_finalize_fuse_shared_out(
        *tensors[:4], top_k, enable_pdl, routed_scaling_factor, shared_gate_logits, out
    )
    return out
