# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What the FlashInfer runners share: which GPU, and what a call may be given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import Support
from sgl_moe_jit.moe.runners.flashinfer_abi import check_version
from sgl_moe_jit.moe.runners.flashinfer_functions import (
    FlashInferFunctions,
    check_installed,
    flashinfer_functions,
)
from sgl_moe_jit.moe.topk import TopKOutput


def capability_support(device: torch.device, allowed: frozenset[tuple[int, int]]) -> Support:
    """Say whether a device is an NVIDIA GPU of one of these compute capabilities."""
    needed = ", ".join(f"{major}.{minor}" for major, minor in sorted(allowed))
    if device.type != "cuda":
        return Support(False, f"device: needs compute capability {needed}, got {device.type}")
    if torch.version.cuda is None or not torch.cuda.is_available():
        return Support(
            False, f"device: needs compute capability {needed}, torch sees no NVIDIA GPU"
        )
    found = torch.cuda.get_device_capability(device)
    if found not in allowed:
        got = ".".join(map(str, found))
        return Support(False, f"device: needs compute capability {needed}, got {got}")
    return Support(True)


def installed_support() -> Support:
    """Say whether FlashInfer can be used; imports it when everything short of that is right."""
    support = check_installed()
    if not support.ok:
        return support
    try:
        version = flashinfer_functions().version
    except UnsupportedError as error:
        return Support(False, str(error))
    return Support(True, f"flashinfer {version}")


def bind_functions(
    name: str,
    config: RunnerConfig,
    supports: Callable[[RunnerConfig], Support],
    functions: FlashInferFunctions | None,
) -> FlashInferFunctions:
    """Return the functions a runner calls: those given, or the installed ones.

    Raises:
        UnsupportedError: the layer cannot be served, or the version is too old; says why.
    """
    support = supports(config) if functions is None else check_version(functions.version)
    if config.layout != name:
        support = Support(False, f"weights: need layout {name}, got {config.layout}")
    if not support.ok:
        raise UnsupportedError(f"runner {name!r} cannot serve this layer: {support.why}")
    return flashinfer_functions() if functions is None else functions


def dtype_support(config: RunnerConfig) -> Support:
    """Say whether the output's dtype, bfloat16, is the layer's."""
    if config.quantization is Quantization.NONE and config.dtype != torch.bfloat16:
        return Support(False, f"dtype: needs bfloat16, got {_name(config.dtype)}")
    return Support(True)


def check_input(hidden_states: Tensor, topk_output: TopKOutput, weights: FlashInferWeights) -> None:
    """Check the input of a call. The kernels have no gradient: one is refused, not dropped.

    Raises:
        TypeError: not bfloat16.
        ValueError: not [T, H], or on another device than the weights.
        UnsupportedError: gradients are on, and an input asks for one.
    """
    hidden_dim = weights.hidden_dim
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden_dim:
        raise ValueError(
            f"hidden_states: expected [num_tokens, {hidden_dim}], got {tuple(hidden_states.shape)}"
        )
    if hidden_states.dtype != torch.bfloat16:
        raise TypeError(
            f"hidden_states: expected bfloat16, got {_name(hidden_states.dtype)}; FlashInfer's "
            "output is bfloat16: convert with .to(torch.bfloat16)"
        )
    if hidden_states.device != weights.device:
        raise ValueError(
            f"hidden_states: expected {weights.device} like the weights, got {hidden_states.device}"
        )
    if torch.is_grad_enabled():
        inputs = (hidden_states, weights.gemm1_weights, weights.gemm2_weights)
        routing = (value for value in vars(topk_output).values() if isinstance(value, Tensor))
        if any(tensor.requires_grad for tensor in (*inputs, *routing)):
            raise UnsupportedError(
                "gradient: FlashInfer's kernels have none, and an input asks for one; call under "
                "torch.no_grad(), or choose the runner grouped_mm or native"
            )


def device_guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: older FlashInfer builds for the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
