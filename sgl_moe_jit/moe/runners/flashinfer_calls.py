# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of FlashInfer's trtllm functions: the layer's, once, and the routing's, each call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.base import as_standard
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.runners.flashinfer_inputs import local_standard, routed_argument
from sgl_moe_jit.moe.runners.flashinfer_routing import (
    RoutingMethod,
    choose_method,
    logits_arguments,
)
from sgl_moe_jit.moe.runners.inputs import check_topk, weigh_input
from sgl_moe_jit.moe.topk import BypassedTopKOutput, PackedTopKOutput, TopKOutput

_STEMS = {
    Quantization.NONE: "trtllm_bf16",
    Quantization.FP8_BLOCK: "trtllm_fp8_block_scale",
    Quantization.NVFP4: "trtllm_fp4_block_scale",
    Quantization.MXFP4: "trtllm_fp4_block_scale",
}
_FP4 = (Quantization.NVFP4, Quantization.MXFP4)
_MAJOR_K, _BLOCK_MAJOR_K = 0, 2  # FlashInfer's WeightLayout
_LINEAR = 2  # FlashInfer's SfLayout
_ACTIVATION = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
_FP4_ONLY = (
    "gemm1_bias",
    "gemm2_bias",
    "output1_scale_scalar",
    "output1_scale_gate_scalar",
    "output2_scale_scalar",
)
_log = logging.getLogger("sgl_moe_jit.moe")
_told: set[str] = set()


def logits_function(quantization: Quantization) -> str:
    """Return the name of the function that takes router logits."""
    return f"{_STEMS[quantization]}_moe"


def routed_function(quantization: Quantization) -> str:
    """Return the name of the function that takes ids and weights."""
    return f"{_STEMS[quantization]}_routed_moe"


def layer_arguments(
    weights: FlashInferWeights, functions: FlashInferFunctions, function: str
) -> dict[str, Any]:
    """Return the arguments that are the same in every call of a layer.

    Raises:
        UnsupportedError: they and those of a call do not fit the function's real signature.
    """
    quantized = weights.quantization is not Quantization.NONE
    arguments: dict[str, Any] = {
        "gemm1_weights": weights.gemm1_weights,
        "gemm2_weights": weights.gemm2_weights,
        "intermediate_size": weights.intermediate_dim,
        "local_num_experts": weights.num_experts,
        "activation_type": weights.activation_type,
    }
    given = {name: getattr(weights, name) for name in _ACTIVATION}
    if weights.quantization in _FP4:
        arguments |= given | {name: getattr(weights, name) for name in _FP4_ONLY}
        if functions.takes(function, "hidden_states_scale_layout"):
            arguments["hidden_states_scale_layout"] = _LINEAR
    else:
        arguments |= {name: value for name, value in given.items() if value is not None}
        arguments["weight_layout"] = _BLOCK_MAJOR_K if weights.is_block_major else _MAJOR_K
        arguments["use_shuffled_weight"] = weights.is_shuffled
    if quantized:
        arguments["gemm1_weights_scale"] = weights.gemm1_weights_scale
        arguments["gemm2_weights_scale"] = weights.gemm2_weights_scale
    is_routed = function == routed_function(weights.quantization)
    if is_routed and quantized:
        arguments["routing_bias"] = None
    functions.check_call(function, arguments | dict.fromkeys(_call_names(is_routed, quantized)))
    return arguments


def _call_names(is_routed: bool, quantized: bool) -> list[str]:
    """Return the names of the arguments that a call may add."""
    names = ["hidden_states", "do_finalize", "output", "enable_pdl", "num_experts", "top_k"]
    names += ["n_group", "topk_group", "local_expert_offset", "routed_scaling_factor"]
    names += ["routing_method_type"]
    names += ["hidden_states_scale"] if quantized else []
    return names + (["topk_ids"] if is_routed else ["routing_logits", "routing_bias"])


@dataclass(frozen=True)
class Routing:
    """One call's routing.

    Attributes:
        function: FlashInfer's.
        arguments: Its routing arguments.
        top_k: K.
        weights_dtype: What the routing weights come back as.
        due_factor: Factor on the routed sum that the weights will not hold.
    """

    function: str
    arguments: dict[str, Any]
    top_k: int
    weights_dtype: torch.dtype = torch.bfloat16
    due_factor: float = 1.0


def route(
    hidden_states: Tensor, output: TopKOutput, weights: FlashInferWeights, version: str
) -> tuple[Tensor, Routing]:
    """Return the input and the routing of a call.

    Args:
        hidden_states: [T, H]. Comes back multiplied where the weights belong on the input.
        output: The router's choice, in any format.
        weights: The layer's parameters.
        version: FlashInfer's.

    Raises:
        TypeError, ValueError: shapes or dtypes disagree; see :func:`check_topk`.
    """
    if isinstance(output, BypassedTopKOutput):
        routing = _from_logits(output, weights)
        if routing is not None:
            _check_tokens("router_logits", output.router_logits, hidden_states)
            return hidden_states, routing
    if isinstance(output, PackedTopKOutput):
        _check_tokens("packed_ids", output.packed_ids, hidden_states)
        if not output.weight_on_input and output.routed_scaling_factor == 1.0:
            return hidden_states, _ready(output.packed_ids.contiguous(), weights)
    standard = as_standard(output)
    check_topk(hidden_states, standard, weights.hidden_dim)
    if isinstance(output, BypassedTopKOutput):
        standard = local_standard(standard, weights.local_expert_offset)
    hidden_states, standard = weigh_input(hidden_states, standard)
    return hidden_states, _ready(routed_argument(standard, weights, version), weights)


def _check_tokens(name: str, tensor: Tensor, hidden_states: Tensor) -> None:
    if tensor.dim() != 2 or tensor.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"{name}: expected [{hidden_states.shape[0]}, ...], got {tuple(tensor.shape)}"
        )


def _from_logits(output: BypassedTopKOutput, weights: FlashInferWeights) -> Routing | None:
    """Return the call that routes by FlashInfer's kernel; None where it has no such method."""
    choice = choose_method(output)
    if choice.method is None:
        if choice.why not in _told:
            _told.add(choice.why)
            _log.info("flashinfer_trtllm: router logits are routed in torch: %s", choice.why)
        return None
    config, offset = output.router_config, weights.local_expert_offset
    needed = offset + weights.num_experts
    if needed > config.num_experts:
        raise ValueError(
            f"router_logits: expected {needed} experts or more, for {weights.num_experts} here "
            f"from {offset} on, got {config.num_experts}"
        )
    return Routing(
        logits_function(weights.quantization),
        logits_arguments(output, choice.method) | {"local_expert_offset": offset},
        config.top_k,
        due_factor=1.0 if choice.applies_factor else config.routed_scaling_factor,
    )


def _ready(topk_ids: Tensor | tuple[Tensor, Tensor], weights: FlashInferWeights) -> Routing:
    """Return the call whose ids come ready: packed, or with their weights."""
    if isinstance(topk_ids, tuple):
        top_k, dtype = topk_ids[0].shape[1], topk_ids[1].dtype
    else:
        top_k, dtype = topk_ids.shape[1], torch.bfloat16
    arguments = {
        "topk_ids": topk_ids,
        "num_experts": weights.num_experts,
        "top_k": top_k,
        "n_group": None,
        "topk_group": None,
        "local_expert_offset": 0,
        "routed_scaling_factor": None,
        "routing_method_type": int(RoutingMethod.RENORMALIZE),
    }
    return Routing(routed_function(weights.quantization), arguments, top_k, dtype)
