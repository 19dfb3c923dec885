# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The experts implementation ``"sgl_moe_jit"`` for transformers' experts interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.bound_runner import run_checked
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.input_checks import refuse_jit_trace
from sgl_moe_jit.moe.runners import create_runner
from sgl_moe_jit.moe.runners.base import MoERunner
from sgl_moe_jit.moe.topk import StandardTopKOutput

try:
    from transformers.activations import SiLUActivation
    from transformers.integrations import moe as _interface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
except ImportError as error:
    raise ImportError(
        "transformers: expected version 5.17 or newer, with the experts interface; "
        "pip install 'sgl-moe-jit[transformers]'"
    ) from error

EXPERTS_IMPLEMENTATION = "sgl_moe_jit"

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SILU_TYPES = (torch.nn.SiLU, SiLUActivation)
# Private there, so it may go; without it every gate counts as a model's own and is called.
_DEFAULT_GATE = getattr(_interface, "_default_apply_gate", None)
# What the installed version's decorator sets on an experts module, with its defaults. A flag that
# this file does not know may only have its default value.
_DECLARED: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(use_experts_implementation).parameters.items()
    if name not in ("experts_class", "experts_interface")
}
_UNKNOWN = {name: default for name, default in _DECLARED.items() if name not in _FLAGS}


def _refuse(module: torch.nn.Module, name: str, expected: str, got: object) -> UnsupportedError:
    cls = type(module)
    return UnsupportedError(
        f"{cls.__module__}.{cls.__qualname__}.{name}: expected {expected}, got {got!r}; choose "
        "another experts implementation for this model: set_experts_implementation('eager')"
    )


def _flag(module: torch.nn.Module, name: str) -> bool:
    value = getattr(module, name, None)
    if value is None and name not in _DECLARED:
        return False  # this version of transformers has no such flag
    if value is not True and value is not False:
        raise _refuse(module, name, "True or False", value)
    return value


def _parameter(module: torch.nn.Module, name: str, why: str) -> Tensor:
    value = getattr(module, name, None)
    if not isinstance(value, Tensor):
        raise _refuse(module, name, f"a parameter, since {why}", value)
    return value


def _callable(module: torch.nn.Module, name: str, why: str) -> Callable[[Tensor], Tensor]:
    value = getattr(module, name, None)
    if not callable(value):
        raise _refuse(module, name, f"a callable, since {why}", value)
    return value  # type: ignore[no-any-return]


def _gate_is_default(module: torch.nn.Module) -> bool:
    return (
        _DEFAULT_GATE is not None
        and "_apply_gate" not in module.__dict__
        and getattr(type(module), "_apply_gate", None) is _DEFAULT_GATE
    )


def activation_is_silu(module: torch.nn.Module) -> bool:
    """Whether a module's ``act_fn`` is SiLU as it is, without hooks that would be lost."""
    activation: Any = getattr(module, "act_fn", None)
    if activation is torch.nn.functional.silu:
        return True
    return (
        type(activation) in _SILU_TYPES
        and "forward" not in activation.__dict__
        and not activation._forward_hooks
        and not activation._forward_pre_hooks
        and not activation._backward_hooks
        and not activation._backward_pre_hooks
    )


def expert_weights(module: torch.nn.Module) -> ExpertWeights:
    """Return the views a runner needs of a transformers experts module.

    The layout comes from the module's flags alone. A gate of the model's own is called, never
    imitated. Nothing is copied or kept, so the next call sees any change of a weight.

    Args:
        module: Of a class decorated with transformers' ``use_experts_implementation``.

    Raises:
        UnsupportedError: a flag is missing or unknown, flags contradict each other, or the
            weights are quantized; names model class, flag and value.
    """
    has_gate = _flag(module, "has_gate")
    is_transposed = _flag(module, "is_transposed")
    is_concatenated = _flag(module, "is_concatenated")
    for name, default in _UNKNOWN.items():
        value = getattr(module, name, default)
        if value != default:
            raise _refuse(module, name, f"{default!r}, the only value known here", value)
    default_gate = has_gate and _gate_is_default(module)
    if default_gate and not is_concatenated:
        raise _refuse(
            module, "is_concatenated", "True, since the default _apply_gate splits in halves", False
        )
    first = "gate_up_proj" if has_gate else "up_proj"
    up = _parameter(module, first, f"has_gate is {has_gate}")
    down = _parameter(module, "down_proj", "every expert has one")
    for name, weight in ((first, up), ("down_proj", down)):
        if weight.dtype not in _DTYPES:
            raise _refuse(module, name, "bfloat16, float16, float32 or float64", weight.dtype)
    # A sentinel id is num_experts: were more experts stored, it would name a real one.
    num_experts = getattr(module, "num_experts", up.shape[0])
    if num_experts != up.shape[0]:
        raise _refuse(module, "num_experts", f"{up.shape[0]}, as {first} has", num_experts)
    up_bias = down_bias = norm = None
    if _flag(module, "has_bias"):
        up_bias = _parameter(module, f"{first}_bias", "has_bias is True")
        down_bias = _parameter(module, "down_proj_bias", "has_bias is True")
    if _flag(module, "has_post_expert_norm"):
        norm = _callable(module, "post_expert_norm", "has_post_expert_norm is True")
    gate = "_apply_gate" if has_gate else "act_fn"
    return ExpertWeights(
        up=up,
        down=down,
        activation=_callable(module, gate, f"has_gate is {has_gate}"),
        is_transposed=is_transposed,
        has_gate=has_gate,
        up_bias=up_bias,
        down_bias=down_bias,
        post_expert_norm=norm,
        is_silu_and_mul=default_gate and activation_is_silu(module),
    )


def experts_forward(
    self: torch.nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    defer: bool | None = False,
    runner: MoERunner | None = None,
) -> Tensor | DeferredFinalizeOutput:
    """Run a transformers experts module with the runner that ``auto`` selects for it.

    Args:
        self: The experts module.
        hidden_states: [T, H]; never written to.
        top_k_index: [T, K] int32 or int64. ``num_experts`` and above (under expert parallelism):
            no expert here.
        top_k_weights: [T, K] floating.
        defer: True asks for un-finalized rows. The default never hands them over, also inside
            ``deferred_finalize_context``: a stock block would not know how to add them. None reads
            that context.
        runner: Of a caller that has just made one for the module's present weights.

    Returns:
        [T, H], dtype of ``hidden_states``; or :class:`DeferredFinalizeOutput`, if asked for and
        possible.

    Raises:
        UnsupportedError: see :func:`expert_weights`; also inside ``torch.jit.trace``.
        RuntimeError: see :func:`run_checked`.
    """
    refuse_jit_trace()
    if runner is None:
        runner = create_runner("auto", expert_weights(self))
    # The caller feeds the same tensor to the shared experts and their gate.
    x = hidden_states.clone() if runner.mutates_input else hidden_states
    topk_output = StandardTopKOutput(top_k_weights, top_k_index)
    output = run_checked(runner, x, topk_output, defer=defer)
    if isinstance(output, DeferredFinalizeOutput):
        return output
    return output.to(hidden_states.dtype)


def register() -> None:
    """Make ``"sgl_moe_jit"`` a valid experts implementation. Doing it again changes nothing.

    After it, ``model.set_experts_implementation("sgl_moe_jit")`` and
    ``from_pretrained(..., experts_implementation="sgl_moe_jit")`` work on every model whose experts
    transformers lets one choose.
    """
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, experts_forward)
