# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: shared experts as expert slots of each rank.

``layout`` the id spaces · ``shared_fusion`` whether shared experts become slots, by ``backends``
what may carry them · ``home``, ``balance``, ``balance_checks`` where a token's shared row goes ·
``eplb`` replicas of routed experts and their weights · ``expert_counts`` what a balancer learns
from · ``dispatch``, ``dispatch_checks``, ``dispatch_plan``, ``transport`` rows over
``torch.distributed`` · ``deepep``, ``deepep_contract`` rows over DeepEP · ``trace``,
``trace_file`` recorded routing.
"""

from sgl_moe_jit.ep.backends import is_deepep_class_backend
from sgl_moe_jit.ep.balance import WaterfillBalancer
from sgl_moe_jit.ep.deepep import DeepEPDispatcher
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.eplb import (
    get_moe_weights,
    logical_to_physical_table,
    mark_global_experts,
    to_physical,
)
from sgl_moe_jit.ep.expert_counts import ExpertCounts, drop_shared_counts
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.ep.shared_fusion import (
    SharedExpertFusionConfig,
    determine_num_fused_shared_experts,
    fused_shared_expert_weight,
)

__all__ = [
    "DeepEPDispatcher",
    "EpLayout",
    "ExpertCounts",
    "HomeExpander",
    "SharedExpertFusionConfig",
    "TorchDispatcher",
    "WaterfillBalancer",
    "determine_num_fused_shared_experts",
    "drop_shared_counts",
    "fused_shared_expert_weight",
    "get_moe_weights",
    "is_deepep_class_backend",
    "logical_to_physical_table",
    "mark_global_experts",
    "to_physical",
]
