# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""torch's ``grouped_mm``, also traceable in float32 and float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ops.library import NAMESPACE, from_dispatcher, has_no_values, library

OP = "grouped_mm"


def _functional(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return torch.nn.functional.grouped_mm(x, weight, offs=offsets)


def _fake(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if weight.dim() == 2:
        return x.new_empty((offsets.shape[0], x.shape[0], weight.shape[1]))
    return x.new_empty((x.shape[0], weight.shape[2]))


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    if weight.dim() != 3:
        raise NotImplementedError("grouped_mm: no gradient of a gradient under torch.compile")
    grad = grad.contiguous()
    op = torch.ops.sgl_moe_jit.grouped_mm
    grad_x = op(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    grad_weight = op(x.t(), grad, offsets) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


# On CUDA torch's own reads the offsets on the host in float32, which no graph capture allows; with
# the tag inductor leaves the op out of its CUDA graphs.
library.define(
    f"{OP}(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
)


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each expert's rows with that expert's matrix.

    Args:
        x: [P, N], rows grouped by expert.
        weight: [E, N, M].
        offsets: [E] int32, the end of each expert's rows.

    Returns:
        [P, M]; rows at and beyond ``offsets[-1]`` are not written, neither here nor in the gradient
        of ``x``.

    Limits are torch's: bfloat16, float16 or float32, one dtype, row strides of multiples of 16
    bytes.
    """
    # torch 2.13 has a shape rule for its own op in bfloat16 alone. Opaque, it can be traced in
    # float32 too; where torch can trace it, inductor may have its way with it.
    if x.dtype != torch.bfloat16 and has_no_values(x, weight):
        result: Tensor = torch.ops.sgl_moe_jit.grouped_mm(x, weight, offsets)
        return result
    return torch.nn.functional.grouped_mm(x, weight, offs=offsets)
