# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: an experts implementation, and our block in place of theirs.

Importing this package registers the implementation ``"sgl_moe_jit"``::

    from sgl_moe_jit.integrations.transformers import fuse_shared_experts

    model.set_experts_implementation("sgl_moe_jit")  # any model that lets one choose
    report = fuse_shared_experts(model)  # whole blocks, where they are known

``load_block`` makes a :class:`~sgl_moe_jit.moe.block.SharedExpertMoEBlock` of one MoE module, and
``load_experts`` a :class:`~sgl_moe_jit.moe.layer.FusedMoE` of its experts, on the same parameters.
``load_slice`` is ``FusedMoE.from_transformers``: one rank's experts, the shared ones among them;
``read_gate`` lets a ``SharedExpertMoEBlock`` around them keep the model's own router.
"""

from sgl_moe_jit.integrations.transformers.blocks import (
    FusionReport,
    fuse_shared_experts,
    unfuse_shared_experts,
)
from sgl_moe_jit.integrations.transformers.experts import EXPERTS_IMPLEMENTATION, register
from sgl_moe_jit.integrations.transformers.layer_loading import (
    load_block,
    load_experts,
)
from sgl_moe_jit.integrations.transformers.slice_loading import load_slice
from sgl_moe_jit.integrations.transformers.stock_gates import read_gate

__all__ = [
    "EXPERTS_IMPLEMENTATION",
    "FusionReport",
    "fuse_shared_experts",
    "load_block",
    "load_experts",
    "load_slice",
    "read_gate",
    "register",
    "unfuse_shared_experts",
]

register()
