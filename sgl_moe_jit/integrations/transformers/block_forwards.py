# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a fused block runs instead of its own forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.integrations.transformers.experts import EXPERTS_IMPLEMENTATION
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, finalize_output


def _routed(block: Any, x: Tensor) -> Tensor | DeferredFinalizeOutput:
    """Call router and experts, asking for un-finalized rows if nobody but the block sees them.

    Hooks, patched forwards (expert parallelism) and wrappers (adapters) expect a tensor, as they
    get it from the stock block.
    """
    _, weights, ids = block.gate(x)
    experts, ask, hooks = block.experts, {}, torch.nn.modules.module
    # torch guards no trace against later hooks. It does not split a frame inside `try`, though: if
    # the experts' call breaks the graph, this frame runs untraced and looks at the hooks each time.
    # So the looking has to be in this frame too, not in a function that would be traced by itself.
    try:
        config = experts.__dict__.get("config")
        if (
            config is not None
            and config._experts_implementation == EXPERTS_IMPLEMENTATION
            and "forward" not in experts.__dict__
            and not experts._forward_hooks
            and not experts._backward_hooks
            and not experts._backward_pre_hooks
            and not hooks._global_forward_hooks
            and not hooks._global_backward_hooks
            and not hooks._global_backward_pre_hooks
            and (torch.compiler.is_compiling() or env.ENABLE_DEFERRED_FINALIZE.get())
        ):
            # Only here: wrappers of the experts need not know this argument.
            ask = {"defer": True}
        routed: Tensor | DeferredFinalizeOutput
        routed = experts(x.view(-1, x.shape[-1]), ids, weights, **ask)
    finally:
        del experts  # any statement: an empty `finally` would leave no `try`
    return routed


def _finish(routed: Tensor | DeferredFinalizeOutput, shared: Tensor, x: Tensor) -> Tensor:
    """Add both, in the dtype that the stock block returns."""
    # Under autocast the three dtypes differ; the kernel takes one.
    if isinstance(routed, DeferredFinalizeOutput) and not (
        routed.gemm2_out.dtype == shared.dtype == x.dtype
    ):
        routed = routed.finalize().to(x.dtype)
    return finalize_output(routed, shared.reshape(-1, x.shape[-1])).view(x.shape)


def forward_plain(self: Any, hidden_states: Tensor) -> Tensor:
    """DeepSeek-V3 style: ``shared_experts`` is added as it is."""
    routed = _routed(self, hidden_states)
    return _finish(routed, self.shared_experts(hidden_states), hidden_states)


def forward_gated(self: Any, hidden_states: Tensor) -> Tensor:
    """Qwen2-MoE style: ``shared_expert`` is scaled by a sigmoid gate on the block's own input."""
    x = hidden_states.view(-1, hidden_states.shape[-1])
    routed = _routed(self, x)
    shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
    return _finish(routed, shared, x).view(hidden_states.shape)
