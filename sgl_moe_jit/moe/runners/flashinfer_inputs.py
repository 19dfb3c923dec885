# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a FlashInfer function reads beside the weights: quantized activations, and the routing."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.flashinfer_abi import pair_dtype
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.topk import PackedTopKOutput, StandardTopKOutput

_E4M3_MAX = 448.0
_GROUP = 128  # values that share a scale in a row of FP8_BLOCK activations


def pad_columns(x: Tensor, width: int) -> Tensor:
    """Return [T, width] contiguous: ``x`` itself, or a copy with zeros behind its columns."""
    if x.shape[1] != width:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))
    return x.contiguous()


def quantize_fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows by groups of 128 values, in plain torch.

    Args:
        x: [T, H] bfloat16, H a multiple of 128.

    Returns:
        [T, H] float8_e4m3fn and [H / 128, T] float32: ``x ~ values * scale``. A group of zeros has
        scale 1; a group with NaN is NaN.
    """
    groups = x.float().unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(dim=-1) / _E4M3_MAX
    scale = scale.masked_fill(scale == 0, 1.0)
    values = (groups / scale.unsqueeze(-1)).clamp(-_E4M3_MAX, _E4M3_MAX)
    return values.flatten(1).to(torch.float8_e4m3fn), scale.t().contiguous()


def quantize_input(
    x: Tensor, weights: FlashInferWeights, functions: FlashInferFunctions
) -> tuple[Tensor, Tensor | None]:
    """Return the activations a trtllm function reads for these weights, and their scales.

    Args:
        x: [T, H_pad] bfloat16, contiguous.
        weights: The layer's parameters.
        functions: FlashInfer's; its quantizers are called for the FP4 forms.
    """
    if weights.quantize_input is not None:
        return weights.quantize_input(x)
    num_tokens, width = x.shape
    if weights.quantization is Quantization.FP8_BLOCK:
        return quantize_fp8_groups(x)
    if weights.quantization is Quantization.NVFP4:
        values, scale = functions.get("fp4_quantize")(
            x, weights.input_global_scale, sf_vec_size=16, is_sf_swizzled_layout=False
        )
        return values, scale.view(torch.float8_e4m3fn).reshape(num_tokens, width // 16)
    if weights.quantization is Quantization.MXFP4:
        values, scale = functions.get("mxfp8_quantize")(x, is_sf_swizzled_layout=False)
        return values, scale.view(torch.float8_e4m3fn).reshape(num_tokens, width // 32)
    return x, None


def local_ids(topk_ids: Tensor, num_experts: int) -> Tensor:
    """Return ids as int32, those without an expert as -1 or ``num_experts``.

    The routing kernels hold an id in 16 bits: 65536 would be expert 0.
    """
    return topk_ids.clamp(-1, num_experts).to(torch.int32).contiguous()


def local_standard(output: StandardTopKOutput, first_expert: int) -> StandardTopKOutput:
    """Return a choice with the router's ids turned into this rank's."""
    return replace(output, topk_ids=output.topk_ids - first_expert) if first_expert else output


def routed_argument(
    output: StandardTopKOutput, weights: FlashInferWeights, version: str
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the ``topk_ids`` argument of a routed function, the factor folded into the weights.

    Deferred or not the weights are the same, so that turning deferral off changes the rounding of
    the sum only. They are rounded to bfloat16 where this version reads nothing else.

    Args:
        output: The choice, with local ids, without weights on the input.
        weights: The layer's parameters.
        version: FlashInfer's.
    """
    ids, topk_weights = local_ids(output.topk_ids, weights.num_experts), output.topk_weights
    if output.routed_scaling_factor != 1.0:
        topk_weights = topk_weights.float() * output.routed_scaling_factor
    dtype = pair_dtype(version, weights.quantization, topk_weights.dtype)
    if dtype is None:
        return PackedTopKOutput.pack(StandardTopKOutput(topk_weights, ids)).packed_ids
    return ids, topk_weights.to(dtype).contiguous()
