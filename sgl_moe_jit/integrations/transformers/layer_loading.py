# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""From a transformers MoE block to this library's, on the same parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers.block_table import (
    PLAIN,
    ROUTED,
    ROUTED_ONLY,
    SUPPORTED,
    forward_is_known,
    modeling_module,
    style_of,
)
from sgl_moe_jit.integrations.transformers.experts import expert_weights
from sgl_moe_jit.integrations.transformers.stock_gates import read_gate
from sgl_moe_jit.moe.activation_kinds import SwiGlu
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.input_checks import check_module
from sgl_moe_jit.moe.layer import FusedMoE

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def describe(module: torch.nn.Module) -> str:
    """Return the full name of a module's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def refuse_hooks(module: torch.nn.Module) -> None:
    """Refuse what would no longer run: the module's own call is not made any more."""
    name = describe(module)
    if "forward" in module.__dict__:
        raise UnsupportedError(f"{name}: expected its own forward, got one set on the instance")
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise UnsupportedError(f"{name}: expected no hooks, which would be lost; remove them first")


def experts_of(experts: torch.nn.Module) -> ExpertWeights:
    """Return the views of :func:`expert_weights` of a module that is not called any more.

    Raises:
        UnsupportedError: as of :func:`load_experts`.
    """
    weights = expert_weights(experts)
    refuse_hooks(experts)
    if getattr(experts, "_is_expert_parallel", False):
        raise UnsupportedError(
            f"{describe(experts)}._is_expert_parallel: expected False, got True; load the whole "
            "layer and pass expert_range and ep_group"
        )
    if weights.is_silu_and_mul:  # the same function, without a hold on the old module
        weights = replace(weights, activation=SwiGlu())
    return weights


def load_experts(experts: torch.nn.Module, **options: Any) -> FusedMoE:
    """Return a ``FusedMoE`` on the parameters of a transformers experts module.

    The parameters are the same objects under the same names: nothing is copied, and a state dict of
    the one fits the other. Load adapters afterwards, on this module.

    Args:
        experts: Of a class decorated with transformers' ``use_experts_implementation``.
        **options: Of :class:`FusedMoE`: runner, expert_range, groups.

    Raises:
        TypeError: ``experts`` is not a module.
        UnsupportedError: see :func:`expert_weights`; or the module has hooks, a patched forward,
            or is one rank's part under transformers' expert parallelism (which works by hooks).
    """
    check_module("experts", experts)
    return FusedMoE(experts_of(experts), **options)


def shared_of(block: Any) -> dict[str, Any]:
    """Return the block's shared experts and their gate as arguments of ours.

    Raises:
        TypeError: it is not a module.
        UnsupportedError: the block's class, or its forward in this version, is not known.
    """
    check_module("block", block)
    cls, name = type(block), describe(block)
    style = style_of(cls.__name__)
    if style is None:
        known = f"{', '.join(sorted((*SUPPORTED, *ROUTED_ONLY)))} of transformers"
        raise UnsupportedError(f"block: expected one of {known}, got {name}")
    home = modeling_module(cls.__name__)
    if cls.__module__ != home:
        raise UnsupportedError(f"block: expected {home}.{cls.__name__}, got {name}")
    if not forward_is_known(cls, style):
        raise UnsupportedError(
            f"{name}.forward of this transformers version is not the one known here"
        )
    if style is ROUTED:
        return {}
    if style is PLAIN:
        return {"shared_experts": block.shared_experts}
    return {
        "shared_experts": block.shared_expert,
        "shared_expert_gate": block.shared_expert_gate,
    }


def load_block(block: torch.nn.Module, **options: Any) -> SharedExpertMoEBlock:
    """Return a ``SharedExpertMoEBlock`` that computes what a transformers MoE block does.

    Router, shared experts and their gate are the block's own modules, so their hooks and adapters
    keep working; expert parameters are the same objects. On CUDA a known router that nobody looks
    at is one kernel after its logits; see ``stock_gates``. Put it where the block was::

        layer.mlp = load_block(layer.mlp)

    Known are DeepSeek-V2/V3 (Kimi-K2 has the latter's class), GLM-4-MoE, Qwen2-MoE and the others
    of ``block_table``, and blocks without shared experts (Qwen3-MoE).

    Args:
        block: The block. Undo ``fuse_shared_experts`` first.
        **options: runner, expert_range, tp_group and ep_group of :class:`FusedMoE`; the rest of
            :class:`SharedExpertMoEBlock`.

    Raises:
        TypeError: ``block`` is not a module.
        UnsupportedError: the block is not known, or has hooks or a patched forward; says why. See
            also :func:`load_experts`.
    """
    shared = shared_of(block)
    refuse_hooks(block)
    names = ("runner", "expert_range", "tp_group", "ep_group")
    for_experts = {name: options.pop(name) for name in names if name in options}
    stock = cast("Any", block)
    experts = load_experts(stock.experts, **for_experts)
    loaded = SharedExpertMoEBlock(stock.gate, experts, **shared, read_gate=read_gate, **options)
    loaded.training = block.training
    return loaded
