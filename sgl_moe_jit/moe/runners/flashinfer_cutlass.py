# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The ``flashinfer_cutlass`` runner: FlashInfer's CUTLASS kernels, finished output only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import (
    RunnerEntry,
    Support,
    as_standard,
    register_runner,
)
from sgl_moe_jit.moe.runners.flashinfer_answer import Call, check_finished
from sgl_moe_jit.moe.runners.flashinfer_common import (
    bind_functions,
    capability_support,
    check_input,
    device_guard,
    dtype_support,
    installed_support,
)
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.runners.flashinfer_inputs import local_ids, local_standard, pad_columns
from sgl_moe_jit.moe.runners.inputs import check_topk, weigh_input
from sgl_moe_jit.moe.topk import BypassedTopKOutput, TopKFormat, TopKOutput

NAME = "flashinfer_cutlass"
FUNCTION = "cutlass_fused_moe"
# Compute capabilities for which FlashInfer 0.6.15 to 0.7.4 build the module.
_BUILT = frozenset({(8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)})
CAPABILITIES = {
    Quantization.NONE: _BUILT,
    Quantization.FP8_PER_TENSOR: _BUILT,
    Quantization.FP8_BLOCK: frozenset({(9, 0)}),
    Quantization.NVFP4: frozenset(one for one in _BUILT if one >= (10, 0)),
}
_NO_ROWS = "cutlass_fused_moe returns finished output only"


def supports(config: RunnerConfig) -> Support:
    """Say whether this runner can serve a layer. Imports FlashInfer when all else is right."""
    support = dtype_support(config)
    if support.ok:
        support = capability_support(config.device, CAPABILITIES[config.quantization])
    return installed_support() if support.ok else support


def can_defer(config: RunnerConfig, topk_format: TopKFormat) -> Support:
    """Say that the rows are never handed over."""
    return Support(False, _NO_ROWS)


class FlashInferCutlassRunner:
    """Runs a layer's experts in one ``cutlass_fused_moe`` call. A request to defer is declined.

    FlashInfer sums a token's rows in its second GEMM with atomics, in an order that changes from
    run to run; so that is switched off here (``use_fused_finalize=False``) and the result is
    repeatable. ``deterministic=False`` leaves it to FlashInfer.

    Routing weights are read as float32, the factor folded in. Router logits are routed in torch
    first. The kernels have no gradient: one is refused, not dropped.

    Args:
        weights: The layer's parameters, prepared for backend cutlass.
        functions: FlashInfer's functions; None looks for the installed ones.
        deterministic: Whether to sum in a fixed order.

    Raises:
        UnsupportedError: the layer cannot be served, or this version's function does not take the
            call; says why.
    """

    name = NAME
    mutates_input = False

    def __init__(
        self,
        weights: FlashInferWeights,
        *,
        functions: FlashInferFunctions | None = None,
        deterministic: bool = True,
    ) -> None:
        self._weights = weights
        self._config = weights.runner_config()
        self._functions = bind_functions(NAME, self._config, supports, functions)
        self._arguments: dict[str, Any] = {
            "fc1_expert_weights": weights.gemm1_weights,
            "fc2_expert_weights": weights.gemm2_weights,
            "fc1_expert_biases": weights.gemm1_bias,
            "fc2_expert_biases": weights.gemm2_bias,
            "output_dtype": torch.bfloat16,
            "quant_scales": list(weights.quant_scales) or None,
            "swiglu_alpha": weights.gemm1_alpha,
            "swiglu_beta": weights.gemm1_beta,
            "swiglu_limit": weights.gemm1_clamp_limit,
            "activation_type": weights.activation_type,
        }
        if weights.quantization is Quantization.FP8_BLOCK:
            self._arguments["use_deepseek_fp8_block_scale"] = True
        if deterministic:
            self._arguments["use_fused_finalize"] = False
        per_call = ("input", "input_sf", "token_selected_experts", "token_final_scales")
        self._functions.check_call(
            FUNCTION, self._arguments | dict.fromkeys((*per_call, "enable_pdl"))
        )

    def can_defer(self, topk_format: TopKFormat) -> bool:
        """Return False."""
        return False

    def run(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """See :class:`MoERunner`. A tensor whatever ``defer`` says; no call for no tokens.

        Raises:
            TypeError: ``hidden_states`` are not bfloat16, or ids and weights of a wrong kind.
            ValueError: shapes or devices disagree.
            UnsupportedError: a gradient is wanted, or FlashInfer's answer is not the documented
                one; names version, function, tensor, expected and got.
        """
        weights = self._weights
        check_input(hidden_states, topk_output, weights)
        choice = as_standard(topk_output)
        check_topk(hidden_states, choice, weights.hidden_dim)
        if isinstance(topk_output, BypassedTopKOutput):
            choice = local_standard(choice, weights.local_expert_offset)
        num_tokens, hidden_dim = hidden_states.shape
        if num_tokens == 0:
            return torch.empty_like(hidden_states)
        x, choice = weigh_input(hidden_states, choice)
        scales = choice.topk_weights.float()
        if choice.routed_scaling_factor != 1.0:
            scales = scales * choice.routed_scaling_factor
        arguments: dict[str, Any] = {
            "token_selected_experts": local_ids(choice.topk_ids, weights.num_experts),
            "token_final_scales": scales.contiguous(),
        }
        if not env.PDL.get():
            arguments["enable_pdl"] = False
        call = Call(
            version=self._functions.version,
            function=FUNCTION,
            num_tokens=num_tokens,
            top_k=choice.topk_ids.shape[1],
            hidden_dim=weights.padded_hidden_dim,
            do_finalize=True,
            weights_dtype=torch.float32,
            device=x.device,
        )
        with device_guard(x):
            values: Tensor = pad_columns(x, weights.padded_hidden_dim)
            if weights.quantize_input is not None:
                values, arguments["input_sf"] = weights.quantize_input(values)
            result = self._functions.get(FUNCTION)(input=values, **self._arguments, **arguments)
        return check_finished(result, call, hidden_dim)


register_runner(
    RunnerEntry(
        NAME,
        supports,
        FlashInferCutlassRunner,
        layout=NAME,
        quantizations=tuple(CAPABILITIES),
        deferral=can_defer,
    )
)
