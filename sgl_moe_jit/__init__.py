# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""MoE finalize and shared-expert add in one kernel, compiled on first use.

The names below are loaded when first used, so that ``--help`` and ``--version`` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sgl_moe_jit.jit import cache_once, load_jit
    from sgl_moe_jit.moe.config import ExpertWeights, MoEConfig
    from sgl_moe_jit.moe.deferred import (
        DeferredFinalizeOutput,
        deferred_finalize_context,
        finalize_output,
        is_deferred_finalize_enabled,
    )
    from sgl_moe_jit.moe.runners import MoERunner, create_runner, register_runner
    from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKFormat
    from sgl_moe_jit.ops import moe_finalize_fuse_shared

_HOME = {
    "cache_once": "jit",
    "load_jit": "jit",
    "ExpertWeights": "moe.config",
    "MoEConfig": "moe.config",
    "DeferredFinalizeOutput": "moe.deferred",
    "deferred_finalize_context": "moe.deferred",
    "finalize_output": "moe.deferred",
    "is_deferred_finalize_enabled": "moe.deferred",
    "MoERunner": "moe.runners",
    "create_runner": "moe.runners",
    "register_runner": "moe.runners",
    "StandardTopKOutput": "moe.topk",
    "TopKFormat": "moe.topk",
    "moe_finalize_fuse_shared": "ops",
}

__all__ = [
    "DeferredFinalizeOutput",
    "ExpertWeights",
    "MoEConfig",
    "MoERunner",
    "StandardTopKOutput",
    "TopKFormat",
    "cache_once",
    "create_runner",
    "deferred_finalize_context",
    "finalize_output",
    "is_deferred_finalize_enabled",
    "load_jit",
    "moe_finalize_fuse_shared",
    "register_runner",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
