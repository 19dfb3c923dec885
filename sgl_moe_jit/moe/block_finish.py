# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The end of a block's call: routed sum, shared output, reduction, each once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.block_facts import adjacent_columns
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, finalize_output
from sgl_moe_jit.moe.expert_slice import ReduceGroups


@dataclass(frozen=True)
class SharedOutput:
    """The shared experts' output [T, H], and the logits [T, 1] of their gate, or None."""

    output: Tensor
    logits: Tensor | None


def _fused_logits(logits: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return logits as the fused op takes them: float32 or like the rows, contiguous."""
    if logits is None:
        return None
    if logits.dtype not in (torch.float32, dtype):
        logits = logits.float()
    return logits.contiguous()


def finish(
    routed: Tensor | DeferredFinalizeOutput,
    shared: SharedOutput | None,
    x: Tensor,
    *,
    reduce_over: ReduceGroups | None,
    add_late: bool,
) -> Tensor:
    """Return the block's output [T, H].

    Args:
        routed: The experts' answer, finished or not.
        shared: What the shared experts made, or None.
        x: [T, H], the block's input. Under autocast the parts' dtypes differ; the routed sum is
            then rounded to this one's before the add, as in transformers' blocks.
        reduce_over: Groups to sum over, or None.
        add_late: Whether the shared output is added after the reduction.

    Raises:
        TypeError: the shared experts returned no tensor.
        ValueError: the shared experts' output has another size.
    """
    output = logits = None
    if shared is not None:
        logits = shared.logits
        made: Any = shared.output  # of a module that may be anything
        if not isinstance(made, Tensor):
            got = type(made).__name__
            raise TypeError(f"shared_experts: expected to return a tensor, got {got}")
        if made.numel() != x.numel():
            raise ValueError(
                f"shared_experts: expected an output of {tuple(x.shape)}, got {tuple(made.shape)}"
            )
        output = adjacent_columns(made.reshape(x.shape))
    if isinstance(routed, DeferredFinalizeOutput):
        dtype = routed.gemm2_out.dtype
        if not add_late and dtype == x.dtype and (output is None or output.dtype == dtype):
            y = routed.finalize(output, shared_gate_logits=_fused_logits(logits, dtype))
            return y if reduce_over is None else reduce_over.reduce(y)
        routed = routed.finalize()
    y = routed.to(x.dtype)
    if not add_late:
        y = finalize_output(y, output, shared_gate_logits=logits)
    if reduce_over is not None:
        y = reduce_over.reduce(y)
    return finalize_output(y, output, shared_gate_logits=logits) if add_late else y
