# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The check of what a FlashInfer function returned, before anyone reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.runners.flashinfer_abi import CHECKED

_OUTPUTS = ("gemm2_output", "expert_weights", "expanded_idx_to_permuted_idx")


@dataclass(frozen=True)
class Call:
    """One call whose answer is checked.

    Attributes:
        version: FlashInfer's.
        function: The function's name.
        num_tokens: T.
        top_k: K.
        hidden_dim: H_pad, the width of the expert rows.
        do_finalize: What was asked for.
        weights_dtype: What the routing weights must come back as.
        device: Where every tensor must be.
    """

    version: str
    function: str
    num_tokens: int
    top_k: int
    hidden_dim: int
    do_finalize: bool
    weights_dtype: torch.dtype
    device: torch.device

    def refuse(self, what: str, expected: str, got: str, hint: str = "") -> NoReturn:
        """Raise: the answer is not the documented one."""
        finish = "" if self.do_finalize else ", or let FlashInfer finish: pass defer=False"
        raise UnsupportedError(
            f"flashinfer {self.version}, {self.function}: {what}: expected {expected}, "
            f"got {got}{hint}; install a flashinfer-python whose answers were checked, "
            f"{CHECKED}{finish}"
        )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {list(value.shape)} on {value.device}"
    return type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def holds_bfloat16_bits(weights: Tensor) -> bool:
    """Say whether a float32 tensor looks like bfloat16 routing weights under a wrong label.

    A writer of N bfloat16 values fills the first half of a buffer of N float32. There the low 16
    bits are a routing weight too: positive, and near 1. In a true float32 they are anything, or
    zero. Reads the values, so it synchronises: for an error's text.
    """
    bits = weights.reshape(-1)[: max(weights.numel() // 2, 1)].contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32) << 16
    values = low.view(torch.float32)
    return bool(((values > 2.0**-30) & (values < 2.0**8)).all())


def check_unfinished(result: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(gemm2_out, expert_weights, expanded_idx_to_permuted_idx)`` after checking them.

    Looks at dtypes, shapes and devices only. On a CPU, and with ``SGL_MOE_JIT_CHECK_INDICES=1``
    outside a capture, also at each index.

    Raises:
        UnsupportedError: not the documented answer; names version, function, tensor, expected, got.
    """
    if not isinstance(result, Sequence) or len(result) != len(_OUTPUTS):
        count = f"{len(result)} tensors" if isinstance(result, Sequence) else _describe(result)
        call.refuse("answer to do_finalize=False", f"[{', '.join(_OUTPUTS)}]", count)
    for name, tensor in zip(_OUTPUTS, result, strict=True):
        if not isinstance(tensor, Tensor):
            call.refuse(name, "a tensor", _describe(tensor))
        if tensor.device != call.device:
            call.refuse(name, f"a tensor on {call.device}", _describe(tensor))
    rows, weights, index = result
    slots, top_k = call.num_tokens * call.top_k, call.top_k
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or rows.shape[1] != call.hidden_dim:
        call.refuse(_OUTPUTS[0], f"bfloat16 [rows, {call.hidden_dim}]", _describe(rows))
    shape = (call.num_tokens, top_k)
    if weights.dtype != call.weights_dtype or tuple(weights.shape) != shape:
        expected = f"{_name(call.weights_dtype)} {list(shape)}"
        hint = ""
        if weights.dtype == torch.float32 and call.weights_dtype == torch.bfloat16:
            capturing = weights.is_cuda and torch.cuda.is_current_stream_capturing()
            if not capturing and weights.numel() and holds_bfloat16_bits(weights):
                hint = " whose bits are bfloat16 weights (flashinfer#3595)"
        call.refuse(_OUTPUTS[1], expected, _describe(weights), hint)
    if index.dtype != torch.int32 or tuple(index.shape) not in ((slots,), shape):
        call.refuse(_OUTPUTS[2], f"int32 [{slots}]", _describe(index))
    _check_bound(index, rows.shape[0], call)
    return rows, weights, index


def _check_bound(index: Tensor, num_rows: int, call: Call) -> None:
    if index.is_cuda:
        if not env.CHECK_INDICES.get() or torch.cuda.is_current_stream_capturing():
            return
    elif index.device.type != "cpu":
        return
    if index.numel() and int(index.max()) >= num_rows:
        slot = int(index.reshape(-1).argmax())
        found = f"{int(index.max())} at slot {slot}"
        call.refuse(_OUTPUTS[2], f"indices below the {num_rows} rows", found)


def check_finished(result: Any, call: Call, hidden_dim: int) -> Tensor:
    """Return the finished output [T, H], where FlashInfer returned it alone or in a list of one.

    Args:
        result: What the function returned.
        call: The call.
        hidden_dim: H. A wider answer is cut (and copied).

    Raises:
        UnsupportedError: not the documented answer.
    """
    if isinstance(result, Sequence) and len(result) == 1:
        result = result[0]
    expected = f"bfloat16 [{call.num_tokens}, {hidden_dim}] on {call.device}"
    if not isinstance(result, Tensor):
        count = f"{len(result)} tensors" if isinstance(result, Sequence) else _describe(result)
        call.refuse("output", expected, count)
    fits = (
        result.dtype == torch.bfloat16
        and result.dim() == 2
        and result.shape[0] == call.num_tokens
        and result.shape[1] in (hidden_dim, call.hidden_dim)
        and result.device == call.device
    )
    if not fits:
        call.refuse("output", expected, _describe(result))
    return result if result.shape[1] == hidden_dim else result[:, :hidden_dim].contiguous()
