# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The check of prepared weights: shapes and dtypes by backend and quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_moe_jit.moe.quantization import SCALES, Quantization

if TYPE_CHECKING:
    from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights

_ALIGNMENT = 128  # of hidden and intermediate sizes, in the trtllm kernels
# Backend cutlass: dtype of the matrices, weights in one item, number of quant_scales.
_CUTLASS = {
    Quantization.NONE: (torch.bfloat16, 1, 0),
    Quantization.FP8_PER_TENSOR: (torch.float8_e4m3fn, 1, 4),
    Quantization.FP8_BLOCK: (torch.float8_e4m3fn, 1, 2),
    Quantization.NVFP4: (torch.int64, 16, 6),
}

Shape = tuple[int, ...]


def _expected(weights: FlashInferWeights) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape of each tensor that backend trtllm needs, beside the optional ones."""
    quantization = weights.quantization
    form = SCALES[quantization]
    e, h, i = weights.num_experts, weights.padded_hidden_dim, weights.intermediate_dim
    m = 2 * i if weights.has_gate else i
    dtype, block = torch.float8_e4m3fn, 128
    if quantization is Quantization.NONE:
        dtype, block = torch.bfloat16, 64
    elif form.values_per_byte == 2:
        dtype = torch.uint8
    per_item = form.values_per_byte or 1
    first: Shape = (e, m, h // per_item)
    second: Shape = (e, h, i // per_item)
    if weights.is_block_major:
        first, second = (e, h // block, m, block), (e, i // block, h, block)
    expected = {"gemm1_weights": (dtype, first), "gemm2_weights": (dtype, second)}
    if form.block_rows is not None and form.block_columns is not None:
        rows, columns = form.block_rows, form.block_columns
        scale = torch.float32 if quantization is Quantization.FP8_BLOCK else torch.float8_e4m3fn
        expected["gemm1_weights_scale"] = (scale, (e, m // rows, h // columns))
        expected["gemm2_weights_scale"] = (scale, (e, h // rows, i // columns))
    if form.has_tensor_scales:
        for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
            expected[name] = (torch.float32, (e,))
        if weights.quantize_input is None:
            expected["input_global_scale"] = (torch.float32, (1,))
    return expected


def _optional(weights: FlashInferWeights) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape of each tensor that backend trtllm takes but does not need."""
    e, i = weights.num_experts, weights.intermediate_dim
    per_expert = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    optional: dict[str, tuple[torch.dtype, Shape]] = {
        name: (torch.float32, (e,)) for name in per_expert
    }
    if weights.quantization in (Quantization.NVFP4, Quantization.MXFP4):
        m = 2 * i if weights.has_gate else i
        optional["gemm1_bias"] = (torch.float32, (e, m))
        optional["gemm2_bias"] = (torch.float32, (e, weights.padded_hidden_dim))
    if weights.quantization is Quantization.NVFP4:
        optional["input_global_scale"] = (torch.float32, (1,))
    return optional


def check_weights(weights: FlashInferWeights) -> None:
    """Check what the kernels rely on; see :meth:`FlashInferWeights.__post_init__`."""
    check = {"trtllm": _check_trtllm, "cutlass": _check_cutlass}.get(weights.backend)
    if check is None:
        raise ValueError(f"backend: expected trtllm or cutlass, got {weights.backend!r}")
    for name, tensor in weights.tensors():
        if tensor.device != weights.device:
            raise ValueError(f"{name}: expected a tensor on {weights.device}, got {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    check(weights)
    if weights.padded_hidden_dim < weights.hidden_dim:
        raise ValueError(
            f"gemm2_weights: expected a hidden size of {weights.hidden_dim} or more, "
            f"got {weights.padded_hidden_dim} in {tuple(weights.gemm2_weights.shape)}"
        )


def _check_dims(weights: FlashInferWeights, allowed: Shape) -> None:
    for name in ("gemm1_weights", "gemm2_weights"):
        tensor = getattr(weights, name)
        if tensor.dim() not in allowed or tensor.dim() != weights.gemm1_weights.dim():
            expected = " or ".join(map(str, allowed))
            raise ValueError(f"{name}: expected {expected} dimensions, got {tuple(tensor.shape)}")


def _check_trtllm(weights: FlashInferWeights) -> None:
    quantization = weights.quantization
    if quantization is Quantization.FP8_PER_TENSOR:
        raise ValueError(
            "quantization: backend trtllm is called for none, fp8_block, nvfp4 and mxfp4, got "
            "fp8_per_tensor; prepare the weights for backend cutlass"
        )
    by_dims = {Quantization.NONE: (4,), Quantization.FP8_BLOCK: (3, 4)}
    _check_dims(weights, by_dims.get(quantization, (3,)))
    for name in ("padded_hidden_dim", "intermediate_dim"):
        if getattr(weights, name) % _ALIGNMENT:
            raise ValueError(
                f"{name}: expected a multiple of {_ALIGNMENT}, got {getattr(weights, name)}; "
                "pad the weights with zeros"
            )
    expected, optional = _expected(weights), _optional(weights)
    given = dict(weights.tensors())
    for name in expected:
        if name not in given:
            raise ValueError(f"{name}: expected a tensor for quantization {quantization}, got None")
    for name, tensor in given.items():
        if name not in expected and name not in optional:
            raise ValueError(f"{name}: expected None for quantization {quantization}, got a tensor")
        dtype, shape = expected.get(name) or optional[name]
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        # Interleaved scales may be padded.
        may_be_longer = dtype == torch.float8_e4m3fn and name.endswith("weights_scale")
        fits = may_be_longer and tensor.numel() >= torch.Size(shape).numel()
        if tuple(tensor.shape) != shape and not fits:
            raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")


def _check_cutlass(weights: FlashInferWeights) -> None:
    quantization = weights.quantization
    if quantization not in _CUTLASS:
        raise ValueError(
            "quantization: backend cutlass is called for none, fp8_per_tensor, fp8_block and "
            f"nvfp4, got {quantization}; prepare the weights for backend trtllm"
        )
    dtype, per_item, num_scales = _CUTLASS[quantization]
    _check_dims(weights, (3,))
    e, h, i = weights.num_experts, weights.padded_hidden_dim, weights.intermediate_dim
    m = 2 * i if weights.has_gate else i
    for name, shape in (
        ("gemm1_weights", (e, m, h // per_item)),
        ("gemm2_weights", (e, h, i // per_item)),
    ):
        tensor = getattr(weights, name)
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got {tuple(tensor.shape)}")
    if len(weights.quant_scales) != num_scales:
        raise ValueError(
            f"quant_scales: expected {num_scales} tensors for quantization {quantization}, "
            f"got {len(weights.quant_scales)}"
        )
    if quantization is Quantization.FP8_PER_TENSOR and weights.quantize_input is None:
        raise ValueError(
            "quantize_input: expected a function for fp8_per_tensor, got None; it divides by the "
            "input scale whose inverse is in quant_scales and returns (float8_e4m3fn, None)"
        )
