# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The two grouped GEMMs of a layer, by the form of its weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.ops.grouped_mm import grouped_mm
from sgl_moe_jit.ops.permute import moe_permute
from sgl_moe_jit.ops.quantize_rows import QuantizedRows, quantize_rows
from sgl_moe_jit.ops.scaled_grouped_mm import scaled_grouped_mm

# Scales travel in 16 bytes behind their row, so that the next row starts on 16 bytes again.
_SCALE_ITEMS = 4

Rows = Tensor | QuantizedRows
"""Rows grouped by expert, as the first GEMM reads them."""


class ExpertGemms(Protocol):
    """What the ``grouped_mm`` runner asks of a form of weights.

    N slots, P = N rows, H hidden size, I expert width; ``offsets`` [E] int32 as ``moe_permute``
    gives them.
    """

    def permute(self, hidden_states: Tensor, ids: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """Return [P, H] rows grouped by expert, each slot's row, and the offsets."""
        ...

    def up(self, x: Rows, offsets: Tensor) -> Tensor:
        """Return the first projection [P, 2I] of rows as :meth:`permute` gives them."""
        ...

    def down(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """Return the second projection [P, H] of [P, I]."""
        ...


class PlainGemms:
    """Weights as they are."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights

    def permute(self, hidden_states: Tensor, ids: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """See :class:`ExpertGemms`."""
        return moe_permute(hidden_states, ids, self._weights.num_experts)

    def up(self, x: Rows, offsets: Tensor) -> Tensor:
        """See :class:`ExpertGemms`."""
        assert isinstance(x, Tensor)
        return grouped_mm(x, self._weights.up_as_input_major(), offsets)

    def down(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`ExpertGemms`."""
        return grouped_mm(hidden, self._weights.down_as_input_major(), offsets)


class PerChannelFp8Gemms:
    """FP8 weights with a scale a row; activations quantized by row in front of each GEMM.

    Tokens are quantized once and then copied to their experts, with the scale behind the row: a
    copy moves H + 16 bytes, where one in bfloat16 moves 2H.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights

    def permute(self, hidden_states: Tensor, ids: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """See :class:`ExpertGemms`."""
        values, scales = quantize_rows(hidden_states)
        # A float32 is four values here: moe_permute copies bits.
        packed = torch.cat(
            (values.view(torch.float32), scales[:, None].expand(-1, _SCALE_ITEMS)), dim=1
        )
        rows, row_of, offsets = moe_permute(packed, ids, self._weights.num_experts)
        values = rows[:, :-_SCALE_ITEMS].view(torch.float8_e4m3fn)
        return QuantizedRows(values, rows[:, -1].contiguous()), row_of, offsets

    def up(self, x: Rows, offsets: Tensor) -> Tensor:
        """See :class:`ExpertGemms`."""
        assert isinstance(x, QuantizedRows)
        scales = self._weights.up_scale_by_row()
        return scaled_grouped_mm(
            x.values, self._weights.up_as_input_major(), x.scales, scales, offsets
        )

    def down(self, hidden: Tensor, offsets: Tensor) -> Tensor:
        """See :class:`ExpertGemms`."""
        x, scales = quantize_rows(hidden), self._weights.down_scale_by_row()
        return scaled_grouped_mm(
            x.values, self._weights.down_as_input_major(), x.scales, scales, offsets
        )
