# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``moe_finalize_fuse_shared_add_rmsnorm`` as torch ops: schemas, kernels, fakes, no gradient."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from sgl_moe_jit.ops.finalize_arguments import check_devices
from sgl_moe_jit.ops.finalize_kernel import check_dtypes
from sgl_moe_jit.ops.finalize_norm_kernel import (
    FP8,
    OP,
    OP_FP8,
    NormInputs,
    NormOutputs,
    check_inputs,
    run,
)
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    check_writable,
    from_dispatcher,
    library,
    mark_written,
)


def new_outputs(
    residual: Tensor,
    fp8: bool,
    given: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> NormOutputs:
    """Return the tensors a call writes: those given, and new ones for the rest."""
    if residual.dim() != 2:
        raise ValueError(
            f"residual: expected [num_tokens, hidden_dim], got {tuple(residual.shape)}"
        )
    out, residual_out, scale = given
    if out is None:
        out = residual.new_empty(residual.shape, dtype=FP8 if fp8 else None)
    if residual_out is None:
        residual_out = residual.new_empty(residual.shape)
    if fp8 and scale is None:
        scale = residual.new_empty((residual.shape[0], 1), dtype=torch.float32)
    return NormOutputs(out, residual_out, scale)


def write(
    outputs: NormOutputs,
    inputs: NormInputs,
    top_k: int,
    eps: float,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
) -> None:
    """Write a caller's own ``outputs``, as an in-place torch operation would."""
    written = [x for x in outputs if x is not None]
    for x in written:
        check_writable(x)
    run(outputs, inputs, top_k, eps, enable_pdl, routed_scaling_factor)
    for x in written:
        mark_written(x)


def _check_fake(inputs: NormInputs, **outputs: Tensor) -> None:
    check_dtypes(inputs.gemm2_out, inputs.expert_weights)
    # With one tensor on "meta" this runs in place of a kernel: nothing real may be left unwritten.
    check_devices(**inputs._asdict(), **outputs)


def _functional(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool | None = None,
    routed_scaling_factor: float = 1.0,
    shared_gate_logits: Tensor | None = None,
    *,
    fp8: bool = False,
    fake: bool = False,
) -> NormOutputs:
    inputs = NormInputs(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        residual,
        weight,
    )
    if fake:
        _check_fake(inputs)
    else:
        check_inputs(inputs, top_k, eps, routed_scaling_factor)
    outputs = new_outputs(residual, fp8)
    if not fake:
        run(outputs, inputs, top_k, eps, enable_pdl, routed_scaling_factor)
    return outputs


def _plain(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    outputs = _functional(*args, **kwargs)
    return outputs.out, outputs.residual_out


def _plain_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _plain(*args, **kwargs, fake=True)


def _fp8(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _functional(*args, **kwargs, fp8=True)
    assert outputs.out_scale is not None
    return outputs.out, outputs.out_scale, outputs.residual_out


def _fp8_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fp8(*args, **kwargs, fake=True)


def _out_variant(
    gemm2_out: Tensor,
    expanded_idx_to_permuted_idx: Tensor,
    expert_weights: Tensor | None,
    shared_output: Tensor | None,
    top_k: int,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    enable_pdl: bool | None,
    routed_scaling_factor: float,
    shared_gate_logits: Tensor | None,
    out: Tensor,
    residual_out: Tensor,
    out_scale: Tensor | None = None,
    *,
    fake: bool = False,
) -> None:
    inputs = NormInputs(
        gemm2_out,
        expanded_idx_to_permuted_idx,
        expert_weights,
        shared_output,
        shared_gate_logits,
        residual,
        weight,
    )
    outputs = NormOutputs(out, residual_out, out_scale)
    if fake:
        _check_fake(inputs, **{k: v for k, v in outputs._asdict().items() if v is not None})
    else:
        write(outputs, inputs, top_k, eps, enable_pdl, routed_scaling_factor)


def _out_fake(*args: Any, **kwargs: Any) -> None:
    _out_variant(*args, **kwargs, fake=True)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _no_gradient(op: str) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            f"{op}: has no gradient; train with moe_finalize_fuse_shared and torch's rms_norm, or "
            "with sgl_moe_jit.ops.reference_norm, which is plain torch in float64"
        )

    return backward


_ARGS = (
    "Tensor gemm2_out, Tensor expanded_idx_to_permuted_idx, Tensor? expert_weights, "
    "Tensor? shared_output, int top_k, Tensor residual, Tensor weight, float eps, "
)
_OPTIONS = "bool? enable_pdl=None, float routed_scaling_factor=1.0, Tensor? shared_gate_logits=None"
_OUT = (
    "bool? enable_pdl, float routed_scaling_factor, Tensor? shared_gate_logits, Tensor(a!) out, "
    "Tensor(b!) residual_out"
)
library.define(f"{OP}({_ARGS}{_OPTIONS}) -> (Tensor, Tensor)")
library.define(f"{OP}_out({_ARGS}{_OUT}) -> ()")
library.define(f"{OP_FP8}({_ARGS}{_OPTIONS}) -> (Tensor, Tensor, Tensor)")
library.define(f"{OP_FP8}_out({_ARGS}{_OUT}, Tensor(c!) out_scale) -> ()")
for _op, _function, _fake in ((OP, _plain, _plain_fake), (OP_FP8, _fp8, _fp8_fake)):
    for _key in ("CPU", "CUDA"):
        library.impl(_op, from_dispatcher(_op, _function), _key)
        library.impl(f"{_op}_out", from_dispatcher(_op, _out_variant), _key)
    torch.library.register_fake(f"{NAMESPACE}::{_op}", from_dispatcher(_op, _fake), lib=library)
    torch.library.register_fake(f"{NAMESPACE}::{_op}_out", _out_fake, lib=library)
    torch.library.register_autograd(
        f"{NAMESPACE}::{_op}", _no_gradient(_op), setup_context=_setup_context, lib=library
    )
