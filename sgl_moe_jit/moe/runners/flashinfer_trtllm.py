# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The ``flashinfer_trtllm`` runner: FlashInfer's TensorRT-LLM kernels (compute capability 10)."""

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
    can_finalize,
    register_runner,
    wants_defer,
)
from sgl_moe_jit.moe.runners.flashinfer_abi import SERVED, RoutingForm, deferral
from sgl_moe_jit.moe.runners.flashinfer_answer import Call, check_finished, check_unfinished
from sgl_moe_jit.moe.runners.flashinfer_calls import (
    Routing,
    layer_arguments,
    logits_function,
    route,
    routed_function,
)
from sgl_moe_jit.moe.runners.flashinfer_common import (
    bind_functions,
    capability_support,
    check_input,
    device_guard,
    dtype_support,
    installed_support,
)
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions, installed_version
from sgl_moe_jit.moe.runners.flashinfer_inputs import pad_columns, quantize_input
from sgl_moe_jit.moe.topk import TopKFormat, TopKOutput

NAME = "flashinfer_trtllm"
CAPABILITIES = frozenset({(10, 0), (10, 3)})
_FP4 = (Quantization.NVFP4, Quantization.MXFP4)


def supports(config: RunnerConfig) -> Support:
    """Say whether this runner can serve a layer. Imports FlashInfer when all else is right."""
    support = dtype_support(config)
    if support.ok and config.quantization is Quantization.FP8_BLOCK and config.num_experts % 4:
        support = Support(False, f"num_experts: needs a multiple of 4, got {config.num_experts}")
    if support.ok:
        support = capability_support(config.device, CAPABILITIES)
    return installed_support() if support.ok else support


def can_defer(config: RunnerConfig, topk_format: TopKFormat) -> Support:
    """Say whether the installed version hands over un-finalized rows of this layer."""
    version = installed_version()
    if version is None:
        return Support(False, "flashinfer is not installed")
    return _deferral(version, config, topk_format)


def _deferral(version: str, config: RunnerConfig, topk_format: TopKFormat) -> Support:
    logits = topk_format is TopKFormat.BYPASSED
    form = RoutingForm.LOGITS if logits else RoutingForm.PAIR
    return deferral(version, config.quantization, form, padded=config.is_padded)


class FlashInferTrtllmRunner:
    """Runs a layer's experts in one FlashInfer call, finished or not.

    Ids and weights go to the routed function, router logits to the kernel that routes, where it has
    the family's method; else they are routed in torch first. Where FlashInfer routes, ties and NaN
    follow its rules. Deferred rows carry every factor in their weights, save for the methods whose
    kernel ignores the factor: there the handle owes it. Routing weights are bfloat16 after
    FlashInfer's own routing, from packed ids, and before the version that reads float32.

    Without deferral FlashInfer sums the rows itself, by a kernel that differs from version to
    version: the bits may differ from those of :meth:`DeferredFinalizeOutput.finalize`. A call under
    ``SGL_MOE_JIT_PDL=0`` launches without programmatic dependent launch.

    The kernels have no gradient: one is refused, not dropped. FlashInfer fetches them from the
    network at their first use, unless the package flashinfer-cubin of its version is installed.

    Args:
        weights: The layer's parameters, prepared for backend trtllm.
        functions: FlashInfer's functions; None looks for the installed ones.

    Raises:
        UnsupportedError: the layer cannot be served, or this version's functions do not take the
            call; says why.
    """

    name = NAME
    mutates_input = False

    def __init__(
        self, weights: FlashInferWeights, *, functions: FlashInferFunctions | None = None
    ) -> None:
        self._weights = weights
        self._config = weights.runner_config()
        self._functions = bind_functions(NAME, self._config, supports, functions)
        self._arguments = {
            function: layer_arguments(weights, self._functions, function)
            for function in (
                logits_function(weights.quantization),
                routed_function(weights.quantization),
            )
        }

    def can_defer(self, topk_format: TopKFormat) -> bool:
        """Return whether this version hands over this layer's rows, in dtypes it names rightly."""
        return _deferral(self._functions.version, self._config, topk_format).ok

    def run(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """See :class:`MoERunner`. Nothing is called for no tokens.

        Raises:
            TypeError: ``hidden_states`` are not bfloat16, or ids and weights of a wrong kind.
            ValueError: shapes or devices disagree.
            UnsupportedError: a gradient is wanted, or FlashInfer's answer is not the documented
                one; names version, function, tensor, expected and got.
        """
        check_input(hidden_states, topk_output, self._weights)
        x, routing = route(hidden_states, topk_output, self._weights, self._functions.version)
        asked = wants_defer(defer)
        deferred = asked and self.can_defer(topk_output.format) and can_finalize(routing.top_k)
        if hidden_states.shape[0] == 0:
            return self._nothing(hidden_states, routing, deferred)
        return self._call(x, routing, deferred)

    def _nothing(
        self, hidden_states: Tensor, routing: Routing, deferred: bool
    ) -> Tensor | DeferredFinalizeOutput:
        if not deferred:
            return torch.empty_like(hidden_states)
        shape = (0, routing.top_k)
        return DeferredFinalizeOutput(
            gemm2_out=hidden_states.new_empty(0, self._weights.padded_hidden_dim),
            expert_weights=hidden_states.new_empty(shape, dtype=routing.weights_dtype),
            expanded_idx_to_permuted_idx=hidden_states.new_empty(shape, dtype=torch.int32),
            top_k=routing.top_k,
            routed_scaling_factor=routing.due_factor,
            hidden_dim=self._weights.hidden_dim,
        )

    def _call(self, x: Tensor, routing: Routing, deferred: bool) -> Tensor | DeferredFinalizeOutput:
        weights, name = self._weights, routing.function
        num_tokens, hidden_dim = x.shape
        padded = pad_columns(x, weights.padded_hidden_dim)
        arguments: dict[str, Any] = {"do_finalize": not deferred, **routing.arguments}
        if not env.PDL.get():
            arguments["enable_pdl"] = False
        call = Call(
            version=self._functions.version,
            function=name,
            num_tokens=num_tokens,
            top_k=routing.top_k,
            hidden_dim=weights.padded_hidden_dim,
            do_finalize=not deferred,
            weights_dtype=routing.weights_dtype,
            device=x.device,
        )
        if not deferred and self._config.is_padded and weights.quantization in _FP4:
            arguments["output"] = torch.empty_like(x)  # FlashInfer's finalize cuts the padding
        with device_guard(x):
            values, scale = quantize_input(padded, weights, self._functions)
            if weights.quantization is not Quantization.NONE:
                arguments["hidden_states_scale"] = scale
            result = self._functions.get(name)(
                hidden_states=values, **self._arguments[name], **arguments
            )
        if not deferred:
            output = check_finished(result, call, hidden_dim)
            return output if routing.due_factor == 1.0 else output * routing.due_factor
        rows, expert_weights, index = check_unfinished(result, call)
        return DeferredFinalizeOutput(
            gemm2_out=rows,
            expert_weights=expert_weights,
            expanded_idx_to_permuted_idx=index.view(num_tokens, routing.top_k),
            top_k=routing.top_k,
            routed_scaling_factor=routing.due_factor,
            hidden_dim=hidden_dim,
        )


register_runner(
    RunnerEntry(
        NAME,
        supports,
        FlashInferTrtllmRunner,
        layout=NAME,
        quantizations=SERVED,
        deferral=can_defer,
    )
)
