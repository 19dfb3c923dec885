# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``quantize_rows``: activations to float8_e4m3fn, each row with a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MAX = 448.0
# Below it a scale would be subnormal, and its rounding could lift the largest element beyond 448.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


class QuantizedRows(NamedTuple):
    """Rows that stand for ``values * scales[:, None]``.

    Attributes:
        values: [N, M] float8_e4m3fn.
        scales: [N] float32.
    """

    values: Tensor
    scales: Tensor


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Scale each row so that its largest element becomes 448, e4m3's largest, and round.

    ``scale = max(max|row| / 448, 2^-126)``, ``value = e4m3(element / scale)``, both divisions and
    the final rounding to nearest even in float32: elementwise, hence bitwise repeatable, a row in a
    batch equal to the row alone, and equal on CPU and CUDA. This is the "dynamic, per token" of
    compressed-tensors, with the division by the scale where some engines multiply by its
    reciprocal. A row of zeros stays zeros. A row with NaN or an infinity becomes NaN as a whole
    (scale NaN or infinite), other rows are not touched.

    Without gradients; in plain torch, so that ``torch.compile`` fuses it.

    Args:
        x: [N, M] bfloat16, float16 or float32.
    """
    least, most = torch.aminmax(x, dim=-1)  # one pass, and nothing as large as x is written
    largest = torch.maximum(most, -least).float()
    # By a tensor: by a number, torch's CUDA kernel multiplies with the rounded reciprocal.
    scales = (largest / largest.new_full((), _MAX)).clamp(min=_LEAST_SCALE)
    return QuantizedRows((x / scales[:, None]).to(torch.float8_e4m3fn), scales)
