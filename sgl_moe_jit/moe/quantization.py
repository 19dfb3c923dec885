# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How expert weights are stored, and which scales each form needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sgl_moe_jit.errors import UnsupportedError


class Quantization(enum.Enum):
    """Form of a layer's expert weights.

    A block shares one scale; a tensor scale is one float32 for each expert.
    """

    NONE = "none"
    """As they are, in bfloat16 or wider. No scale."""
    FP8_PER_TENSOR = "fp8_per_tensor"
    """float8_e4m3fn. One float32 scale for each expert and projection."""
    FP8_PER_CHANNEL = "fp8_per_channel"
    """float8_e4m3fn. One float32 scale for each output row; activations by row, as they come."""
    FP8_BLOCK = "fp8_block"
    """float8_e4m3fn. One float32 scale for 128 x 128 weights; activations by 1 x 128."""
    NVFP4 = "nvfp4"
    """Two e2m1 a byte. One float8_e4m3fn scale for 16 weights, and a tensor scale on top."""
    MXFP4 = "mxfp4"
    """Two e2m1 a byte. One power of two (ue8m0, a byte) for 32 weights."""

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of_format(cls, name: str | None) -> Quantization:
        """Return the form of weights that a format of :class:`MoEConfig` has.

        Raises:
            UnsupportedError: no runner here knows the format.
        """
        if name not in _FORMATS:
            known = ", ".join(map(str, _FORMATS))
            raise UnsupportedError(f"quantization: expected one of {known}, got {name}")
        return _FORMATS[name]


_FORMATS: dict[str | None, Quantization] = {
    None: Quantization.NONE,
    "fp8 e4m3 channel": Quantization.FP8_PER_CHANNEL,
    "fp8 e4m3 128x128": Quantization.FP8_BLOCK,
    "nvfp4 g16": Quantization.NVFP4,
    "mxfp4 g32": Quantization.MXFP4,
}


@dataclass(frozen=True)
class ScaleForm:
    """What one quantization stores beside its weights.

    Attributes:
        block_rows: Output rows that share one block scale; None: no block scales.
        block_columns: Input columns that share one block scale; None beside ``block_rows``: all.
        values_per_byte: Weights in one stored byte; None for bfloat16, two bytes each.
        has_tensor_scales: Whether each expert and projection has a float32 scale of its own.
    """

    block_rows: int | None
    block_columns: int | None
    values_per_byte: int | None
    has_tensor_scales: bool


SCALES: dict[Quantization, ScaleForm] = {
    Quantization.NONE: ScaleForm(None, None, None, False),
    Quantization.FP8_PER_TENSOR: ScaleForm(None, None, 1, True),
    Quantization.FP8_PER_CHANNEL: ScaleForm(1, None, 1, False),
    Quantization.FP8_BLOCK: ScaleForm(128, 128, 1, False),
    Quantization.NVFP4: ScaleForm(1, 16, 2, True),
    Quantization.MXFP4: ScaleForm(1, 32, 2, False),
}
