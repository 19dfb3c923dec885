# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: an experts implementation, and the shared-expert add in the finalize.

Importing this package registers the implementation ``"sgl_moe_jit"``::

    from sgl_moe_jit.integrations.transformers import fuse_shared_experts

    model.set_experts_implementation("sgl_moe_jit")  # any model that lets one choose
    report = fuse_shared_experts(model)  # where there are shared experts
"""

from sgl_moe_jit.integrations.transformers.blocks import (
    FusionReport,
    fuse_shared_experts,
    unfuse_shared_experts,
)
from sgl_moe_jit.integrations.transformers.experts import EXPERTS_IMPLEMENTATION, register

__all__ = [
    "EXPERTS_IMPLEMENTATION",
    "FusionReport",
    "fuse_shared_experts",
    "register",
    "unfuse_shared_experts",
]

register()
