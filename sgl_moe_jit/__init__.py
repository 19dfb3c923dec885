# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""MoE finalize and shared-expert add in one kernel, compiled on first use.

The names below are loaded when first used, so that ``--help`` and ``--version`` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sgl_moe_jit.bench.ahead import warmup
    from sgl_moe_jit.ep.backends import is_deepep_class_backend
    from sgl_moe_jit.ep.balance import WaterfillBalancer
    from sgl_moe_jit.ep.deepep import DeepEPDispatcher
    from sgl_moe_jit.ep.dispatch import TorchDispatcher
    from sgl_moe_jit.ep.eplb import get_moe_weights, to_physical
    from sgl_moe_jit.ep.expert_counts import ExpertCounts
    from sgl_moe_jit.ep.home import HomeExpander
    from sgl_moe_jit.ep.layout import EpLayout
    from sgl_moe_jit.ep.shared_fusion import (
        SharedExpertFusionConfig,
        determine_num_fused_shared_experts,
        fused_shared_expert_weight,
    )
    from sgl_moe_jit.jit import cache_once, load_jit
    from sgl_moe_jit.moe.block import SharedExpertMoEBlock
    from sgl_moe_jit.moe.config import MoEConfig
    from sgl_moe_jit.moe.deferred import (
        DeferredFinalizeOutput,
        deferred_finalize_context,
        finalize_output,
        is_deferred_finalize_enabled,
    )
    from sgl_moe_jit.moe.dispatch import ExpertParallelPath
    from sgl_moe_jit.moe.expert_weights import ExpertWeights
    from sgl_moe_jit.moe.layer import FusedMoE
    from sgl_moe_jit.moe.prepared_layer import PreparedMoE
    from sgl_moe_jit.moe.router import Router
    from sgl_moe_jit.moe.router_config import RouterConfig
    from sgl_moe_jit.moe.routing import router_logits, select_experts
    from sgl_moe_jit.moe.runner_config import RunnerConfig
    from sgl_moe_jit.moe.runners import (
        MoERunner,
        RunnerPlan,
        create_runner,
        explain,
        register_runner,
    )
    from sgl_moe_jit.moe.topk import (
        BypassedTopKOutput,
        PackedTopKOutput,
        StandardTopKOutput,
        TopKFormat,
    )
    from sgl_moe_jit.ops import (
        moe_finalize_fuse_shared,
        moe_finalize_fuse_shared_add_rmsnorm,
        moe_finalize_fuse_shared_add_rmsnorm_fp8,
    )

_HOME = {
    "DeepEPDispatcher": "ep.deepep",
    "TorchDispatcher": "ep.dispatch",
    "WaterfillBalancer": "ep.balance",
    "HomeExpander": "ep.home",
    "EpLayout": "ep.layout",
    "ExpertCounts": "ep.expert_counts",
    "SharedExpertFusionConfig": "ep.shared_fusion",
    "determine_num_fused_shared_experts": "ep.shared_fusion",
    "fused_shared_expert_weight": "ep.shared_fusion",
    "get_moe_weights": "ep.eplb",
    "is_deepep_class_backend": "ep.backends",
    "to_physical": "ep.eplb",
    "cache_once": "jit",
    "load_jit": "jit",
    "ExpertParallelPath": "moe.dispatch",
    "ExpertWeights": "moe.expert_weights",
    "FusedMoE": "moe.layer",
    "PreparedMoE": "moe.prepared_layer",
    "SharedExpertMoEBlock": "moe.block",
    "MoEConfig": "moe.config",
    "DeferredFinalizeOutput": "moe.deferred",
    "deferred_finalize_context": "moe.deferred",
    "finalize_output": "moe.deferred",
    "is_deferred_finalize_enabled": "moe.deferred",
    "MoERunner": "moe.runners",
    "RunnerPlan": "moe.runners",
    "create_runner": "moe.runners",
    "explain": "moe.runners",
    "register_runner": "moe.runners",
    "Router": "moe.router",
    "RouterConfig": "moe.router_config",
    "RunnerConfig": "moe.runner_config",
    "router_logits": "moe.routing",
    "select_experts": "moe.routing",
    "BypassedTopKOutput": "moe.topk",
    "PackedTopKOutput": "moe.topk",
    "StandardTopKOutput": "moe.topk",
    "TopKFormat": "moe.topk",
    "moe_finalize_fuse_shared": "ops",
    "moe_finalize_fuse_shared_add_rmsnorm": "ops",
    "moe_finalize_fuse_shared_add_rmsnorm_fp8": "ops",
    "warmup": "bench.ahead",
}

__all__ = [
    "BypassedTopKOutput",
    "DeepEPDispatcher",
    "DeferredFinalizeOutput",
    "EpLayout",
    "ExpertCounts",
    "ExpertParallelPath",
    "ExpertWeights",
    "FusedMoE",
    "HomeExpander",
    "MoEConfig",
    "MoERunner",
    "PackedTopKOutput",
    "PreparedMoE",
    "Router",
    "RouterConfig",
    "RunnerConfig",
    "RunnerPlan",
    "SharedExpertFusionConfig",
    "SharedExpertMoEBlock",
    "StandardTopKOutput",
    "TopKFormat",
    "TorchDispatcher",
    "WaterfillBalancer",
    "cache_once",
    "create_runner",
    "deferred_finalize_context",
    "determine_num_fused_shared_experts",
    "explain",
    "finalize_output",
    "fused_shared_expert_weight",
    "get_moe_weights",
    "is_deepep_class_backend",
    "is_deferred_finalize_enabled",
    "load_jit",
    "moe_finalize_fuse_shared",
    "moe_finalize_fuse_shared_add_rmsnorm",
    "moe_finalize_fuse_shared_add_rmsnorm_fp8",
    "register_runner",
    "router_logits",
    "select_experts",
    "to_physical",
    "warmup",
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
