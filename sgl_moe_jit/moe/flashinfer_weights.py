# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's expert parameters in the layout that a FlashInfer function reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from sgl_moe_jit.moe.flashinfer_layouts import check_weights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig

SWIGLU = 3
"""FlashInfer's ``ActivationType.Swiglu``, the same number in every version."""

QuantizeInput = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From [T, H_pad] bfloat16 to the quantized activations and their scales."""


@dataclass(frozen=True, eq=False)
class FlashInferWeights:
    """One layer's expert parameters, prepared by the caller; held as they are, never copied.

    E experts on this rank, H hidden size of the layer, H_pad >= H that of these tensors, I expert
    width of these tensors, M = 2I with a gate, else I. FlashInfer orders a gated first projection
    up first, then gate. Its ``reorder_rows_for_gated_act_gemm``, ``shuffle_matrix_a``,
    ``shuffle_matrix_sf_a`` and ``convert_to_block_layout`` make the trtllm layouts.

    ===============  ================================  ========================================
    backend trtllm   gemm1_weights, gemm2_weights      their scales
    ===============  ================================  ========================================
    NONE             bfloat16 [E, H_pad/64, M, 64],    None
                     [E, I/64, H_pad, 64]
    FP8_BLOCK        float8_e4m3fn [E, M, H_pad],      float32 [E, M/128, H_pad/128],
                     [E, H_pad, I], or in blocks       [E, H_pad/128, I/128]
                     [E, H_pad/128, M, 128],
                     [E, I/128, H_pad, 128]
    NVFP4            uint8 [E, M, H_pad/2],            float8_e4m3fn [E, M, H_pad/16],
                     [E, H_pad, I/2]                   [E, H_pad, I/16]
    MXFP4            as NVFP4                          float8_e4m3fn (the bytes are ue8m0)
                                                       [E, M, H_pad/32], [E, H_pad, I/32]
    ===============  ================================  ========================================

    Backend cutlass: [E, M, H_pad] and [E, H_pad, I] in bfloat16 (NONE) or float8_e4m3fn, NVFP4
    viewed as int64 (16 weights an item), and 0 (NONE), 4 (FP8_PER_TENSOR), 2 (FP8_BLOCK) or 6
    (NVFP4) ``quant_scales``.

    Attributes:
        backend: Whose layout it is: ``trtllm`` or ``cutlass``.
        quantization: Of the weights.
        hidden_dim: H.
        intermediate_dim: I.
        gemm1_weights: First projection.
        gemm2_weights: Second projection.
        gemm1_weights_scale: Its block scales, or None.
        gemm2_weights_scale: Its block scales, or None.
        output1_scale_scalar: [E] float32, NVFP4 only. What the first projection's output is
            multiplied by before it is quantized again.
        output1_scale_gate_scalar: [E] float32, NVFP4 only. The same for its gate half.
        output2_scale_scalar: [E] float32, NVFP4 only. The same for the second projection.
        input_global_scale: [1] float32, NVFP4 only. What activations are multiplied by before they
            are quantized.
        gemm1_bias: [E, M] float32, FP4 only; or, for cutlass, of the output's dtype.
        gemm2_bias: [E, H_pad] float32, FP4 only; or, for cutlass, of the output's dtype.
        gemm1_alpha: [E] float32, or None. The activation's parameters, as FlashInfer defines them.
        gemm1_beta: [E] float32, or None.
        gemm1_clamp_limit: [E] float32, or None.
        activation_type: FlashInfer's ``ActivationType``.
        has_gate: Whether the first projection holds up and gate.
        local_expert_offset: The router's number of this rank's first expert, for router logits;
            ids that come ready are local ones.
        is_shuffled: Whether FP8_BLOCK matrices are shuffled. The others must be.
        quant_scales: Backend cutlass: FlashInfer's list for this quantization, in its order.
        quantize_input: Replaces the default quantization of activations: NVFP4 with
            ``input_global_scale``, MXFP4 to MXFP8, FP8_BLOCK by 1 x 128. MXFP4 takes bfloat16
            activations too: ``lambda x: (x, None)``.
    """

    backend: Literal["trtllm", "cutlass"]
    quantization: Quantization
    hidden_dim: int
    intermediate_dim: int
    gemm1_weights: Tensor
    gemm2_weights: Tensor
    gemm1_weights_scale: Tensor | None = None
    gemm2_weights_scale: Tensor | None = None
    output1_scale_scalar: Tensor | None = None
    output1_scale_gate_scalar: Tensor | None = None
    output2_scale_scalar: Tensor | None = None
    input_global_scale: Tensor | None = None
    gemm1_bias: Tensor | None = None
    gemm2_bias: Tensor | None = None
    gemm1_alpha: Tensor | None = None
    gemm1_beta: Tensor | None = None
    gemm1_clamp_limit: Tensor | None = None
    activation_type: int = SWIGLU
    has_gate: bool = True
    local_expert_offset: int = 0
    is_shuffled: bool = True
    quant_scales: tuple[Tensor, ...] = ()
    quantize_input: QuantizeInput | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices.

        Raises:
            TypeError: a tensor is not of the dtype that the table names.
            ValueError: a tensor is missing, superfluous, strided, elsewhere, or not of the shape.
        """
        check_weights(self)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gemm1_weights.shape[0]

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.gemm1_weights.device

    @property
    def is_block_major(self) -> bool:
        """Whether the matrices are stored in blocks along their input dimension."""
        return self.gemm1_weights.dim() == 4

    @property
    def padded_hidden_dim(self) -> int:
        """H_pad: rows of the second projection."""
        return self.gemm2_weights.shape[2 if self.is_block_major else 1]

    def runner_config(self) -> RunnerConfig:
        """Return what decides which runner can serve these weights."""
        return RunnerConfig(
            num_experts=self.num_experts,
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            dtype=torch.bfloat16,
            device=self.device,
            is_transposed=False,
            aligned_16_bytes=True,
            quantization=self.quantization,
            layout=f"flashinfer_{self.backend}",
            is_padded=self.padded_hidden_dim != self.hidden_dim,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value
        for i, scale in enumerate(self.quant_scales):
            yield f"quant_scales[{i}]", scale
