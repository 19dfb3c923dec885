# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: shared experts as expert slots of each rank."""

from sgl_moe_jit.ep.backends import is_deepep_class_backend
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.ep.shared_fusion import (
    SharedExpertFusionConfig,
    determine_num_fused_shared_experts,
    fused_shared_expert_weight,
)

__all__ = [
    "EpLayout",
    "SharedExpertFusionConfig",
    "determine_num_fused_shared_experts",
    "fused_shared_expert_weight",
    "is_deepep_class_backend",
]
