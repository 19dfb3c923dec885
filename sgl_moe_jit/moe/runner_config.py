# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What decides which runner can serve a layer's weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.input_checks import check_dense
from sgl_moe_jit.moe.quantization import Quantization


@dataclass(frozen=True)
class RunnerConfig:
    """What decides which runner can serve a layer.

    Attributes:
        num_experts: E, on this rank.
        hidden_dim: H.
        intermediate_dim: I.
        dtype: Of the expert weights; of the hidden states where weights are quantized.
        device: Of the expert weights.
        is_transposed: Layout of both projections.
        aligned_16_bytes: Whether both projections, and every matrix row in them, start on a
            multiple of 16 bytes.
        quantization: Form of the expert weights.
        layout: ``plain``: as :class:`ExpertWeights` says. A runner's name: prepared for that
            runner. ``any``: still to be prepared for whichever runner is chosen.
        is_padded: Whether prepared weights have a larger hidden size than the layer.
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    dtype: torch.dtype
    device: torch.device
    is_transposed: bool
    aligned_16_bytes: bool
    quantization: Quantization = Quantization.NONE
    layout: str = "plain"
    is_padded: bool = False

    def describe(self) -> str:
        """Return the sizes in one line."""
        dtype = str(self.dtype).removeprefix("torch.")
        form = dtype if self.quantization is Quantization.NONE else str(self.quantization)
        return (
            f"{self.num_experts} experts, hidden {self.hidden_dim}, width {self.intermediate_dim}, "
            f"{form}, layout {self.layout}, on {self.device}"
        )

    @classmethod
    def of(cls, weights: ExpertWeights) -> RunnerConfig:
        """Read the sizes off the weights and their declared layout.

        Raises:
            TypeError: ``weights`` are none; float8_e4m3fn weights without scales, or scales beside
                others; or weights that are not floating, or of two dtypes.
            ValueError: the two projections, or a projection and its bias or scales, do not belong
                together; names the shapes.
        """
        if not isinstance(weights, ExpertWeights):
            raise TypeError(
                "weights: expected ExpertWeights or FlashInferWeights, got "
                f"{type(weights).__name__}"
            )
        for name, x in (("up", weights.up), ("down", weights.down)):
            check_dense(name, x)
        if weights.up.dim() != 3 or weights.down.dim() != 3:
            shapes = f"{tuple(weights.up.shape)} and {tuple(weights.down.shape)}"
            raise ValueError(f"up, down: expected 3 dimensions, got {shapes}")
        up, down = weights.up_as_input_major(), weights.down_as_input_major()
        shapes = f"{tuple(weights.up.shape)} and {tuple(weights.down.shape)}"
        factor = 2 if weights.has_gate else 1
        fits = (
            up.shape[0] == down.shape[0]
            and up.shape[1] == down.shape[2]
            and up.shape[2] == factor * down.shape[1]
        )
        if not fits:
            raise ValueError(
                f"up, down: shapes {shapes} do not belong together with "
                f"is_transposed={weights.is_transposed}, has_gate={weights.has_gate}"
            )
        _check_scales(weights)
        _check_biases(weights, up.shape[2])

        def aligned(matrix: Tensor) -> bool:
            size = matrix.element_size()
            rows = all(s == 1 or s * size % 16 == 0 for s in matrix.stride())
            # Storages start aligned. Dynamo cannot trace an offset: torch checks it then.
            if torch.compiler.is_compiling():
                return rows
            return rows and matrix.storage_offset() * size % 16 == 0

        return cls(
            num_experts=up.shape[0],
            hidden_dim=up.shape[1],
            intermediate_dim=down.shape[1],
            dtype=up.dtype if weights.up_scale is None else torch.bfloat16,
            device=up.device,
            is_transposed=weights.is_transposed,
            aligned_16_bytes=aligned(weights.up) and aligned(weights.down),
            quantization=weights.quantization,
        )


def _check_biases(weights: ExpertWeights, up_rows: int) -> None:
    """Check the biases' shapes, which broadcast would let pass, and the projections' dtypes."""
    up, down = weights.up, weights.down
    if not up.is_floating_point() or up.dtype != down.dtype:
        raise TypeError(
            f"up, down: expected one floating dtype, got {up.dtype} and {down.dtype}; convert them "
            "with .to()"
        )
    hidden_dim = weights.up_as_input_major().shape[1]
    for name, bias, size in (
        ("up_bias", weights.up_bias, up_rows),
        ("down_bias", weights.down_bias, hidden_dim),
    ):
        if bias is not None and tuple(bias.shape) != (up.shape[0], size):
            expected = (up.shape[0], size)
            raise ValueError(f"{name}: expected {expected}, got {tuple(bias.shape)}")


def _check_scales(weights: ExpertWeights) -> None:
    """Check that FP8 weights, and no others, come with a scale for each output row."""
    projections = (
        ("up", weights.up, weights.up_scale, weights.up_as_input_major()),
        ("down", weights.down, weights.down_scale, weights.down_as_input_major()),
    )
    for name, matrix, scale, input_major in projections:
        is_fp8 = matrix.dtype == torch.float8_e4m3fn
        if is_fp8 != (scale is not None):
            got = "None" if scale is None else f"scales beside {matrix.dtype}"
            raise TypeError(
                f"{name}_scale: expected float32 scales beside float8_e4m3fn weights, and None "
                f"beside others, got {got}; a module's .to(dtype) converts weights, scales stay: "
                "move it with .to(device) alone"
            )
        if scale is None:
            continue
        rows = (input_major.shape[0], input_major.shape[2])
        if scale.dtype != torch.float32:
            raise TypeError(
                f"{name}_scale: expected float32, got {scale.dtype}; convert it with .float()"
            )
        if tuple(scale.shape) not in (rows, (*rows, 1)):
            raise ValueError(
                f"{name}_scale: expected {rows}, one for each output row, or with a last "
                f"dimension of 1, got {tuple(scale.shape)}"
            )
        if scale.device != matrix.device:
            raise ValueError(f"{name}_scale: expected on {matrix.device}, got {scale.device}")
