# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a fused block runs instead of its own forward: a ``SharedExpertMoEBlock`` on its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.integrations.transformers.experts import (
    EXPERTS_IMPLEMENTATION,
    expert_weights,
)
from sgl_moe_jit.integrations.transformers.hooks import forward_is_own, stands_around
from sgl_moe_jit.integrations.transformers.stock_gates import read_gate
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.block_facts import Call, ExpertsFacts, hooked
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.expert_slice import ReduceGroups
from sgl_moe_jit.moe.input_checks import refuse_jit_trace
from sgl_moe_jit.moe.layer_base import deferral_of
from sgl_moe_jit.moe.runner_choice import RunnerChoice
from sgl_moe_jit.moe.runners.plan import explain
from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKOutput

# What calls, and callers who choose, leave on a fused block, beside what it was fused with.
CALL_STATE = (
    *("last_plan", "_routed_by", "_known_width", "_known_choice"),
    *("dual_stream", "shared_width"),
)


def called_as_is(experts: torch.nn.Module) -> str:
    """Return why experts get no more than a stock block gives them; empty when they do.

    Then whoever stands between block and experts (a hook, a wrapper, another implementation) sees
    the stock arguments and a finished tensor.
    """
    config = experts.__dict__.get("config")
    implementation = getattr(config, "_experts_implementation", None)
    if implementation is None:
        return f"a {type(experts).__name__}, called as it is"
    if implementation != EXPERTS_IMPLEMENTATION:
        return f"the experts implementation is {implementation!r}"
    if not forward_is_own(experts):
        return "their forward is replaced on the instance"
    return stands_around(experts) or hooked(experts)


class FusedBlock(SharedExpertMoEBlock):
    """The part of a fused block's class that comes before its stock class.

    The block was made by its stock class: what ``SharedExpertMoEBlock`` is told when it is made
    stands here instead, and everything else is looked up on the module in each call. So a replaced
    child, an adapter, a hook and a changed weight count from the next call on.
    """

    read_gate = read_gate
    groups = ReduceGroups(None, None)
    shared_is_replicated = shared_is_fused = reduce_results = False
    dual_stream = None
    shared_width = None
    _known_width = (0, 0)
    last_plan = None
    _known_choice: RunnerChoice | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which finds its runner itself."""
        return {name: x for name, x in self.__dict__.items() if name != "_known_choice"}

    def _no_shared(self, x: Tensor) -> str:
        # Without tokens they run too: a hook on them, or sharded parameters, may count on the call.
        return "none" if self.shared_experts is None else ""

    def _experts_facts(self) -> ExpertsFacts:
        experts: Any = self.experts
        reason = called_as_is(experts)
        if reason:
            return ExpertsFacts.as_is(experts, reason, mutates_input=False)
        refuse_jit_trace()
        weights = expert_weights(experts)
        choice = RunnerChoice.of(weights, self._known_choice)
        # Other tracers do not count as compiling; their sizes would fail in every later call.
        is_plain = type(choice.config.hidden_dim) is int and not torch.compiler.is_compiling()
        if choice is not self._known_choice and is_plain:
            self._known_choice = choice
        runner, config = choice.runner(weights), choice.config
        return ExpertsFacts(
            runner=runner,
            mutates_input=False,  # the experts' own forward sees to that
            refusal="",
            support=lambda form: deferral_of(runner, lambda: config, form),
            intermediate_dim=config.intermediate_dim,
            has_gate=weights.has_gate,
            hidden_dim=0 if experts._forward_pre_hooks else config.hidden_dim,
        )

    def _explain_experts(self) -> str:
        experts: Any = self.experts
        reason = called_as_is(experts)
        return f"experts: {reason}" if reason else str(explain(expert_weights(experts)))

    def _routed(
        self, call: Call, topk_output: TopKOutput, deferred: bool
    ) -> Tensor | DeferredFinalizeOutput:
        """Call the experts as the stock block does, and ask for rows if nobody else sees them.

        Whether somebody does was looked up when the call was planned, and is again here: torch
        guards no trace against later hooks. It does not split a frame inside ``try``, though: if
        the experts' call breaks the graph, this frame runs untraced and looks each time. So the
        looking has to be in this frame too, not in a function that would be traced by itself.
        """
        assert isinstance(topk_output, StandardTopKOutput)  # of read_gate
        experts: Any = self.experts
        ask: dict[str, Any] = {}
        unchanged = False
        hooks = torch.nn.modules.module
        try:
            if (
                not call.experts.refusal
                and ("forward" not in experts.__dict__ or forward_is_own(experts))
                and not experts._forward_hooks
                and not experts._backward_hooks
                and not experts._backward_pre_hooks
                and not hooks._global_forward_hooks
                and not hooks._global_backward_hooks
                and not hooks._global_backward_pre_hooks
            ):
                # Only here: wrappers of the experts need not know these arguments.
                ask = {"defer": deferred}
                # A hook in front of them may put other weights in place.
                unchanged = not experts._forward_pre_hooks and not hooks._global_forward_pre_hooks
                if unchanged and call.stream is not None:
                    ask["runner"] = call.experts.runner
            routed: Tensor | DeferredFinalizeOutput
            ids = topk_output.topk_ids
            if not (ask and unchanged):
                ids = ids.long()  # who looks at the call, or takes it, knows the stock router's
            routed = experts(call.x, ids, topk_output.topk_weights, **ask)
        finally:
            del experts  # any statement: an empty `finally` would leave no `try`
        return routed


class FusedPlain(FusedBlock):
    """``shared_experts`` is added as it is; it and the router get the input as it came."""

    _flattens = False
    shared_expert_gate = None


class FusedGated(FusedBlock):
    """``shared_expert`` is scaled by a sigmoid gate on the block's own input."""

    @property
    def shared_experts(self) -> Any:  # type: ignore[override]
        """The shared expert, under its name in this library."""
        return self.shared_expert


class FusedRouted(FusedBlock):
    """There are no shared experts."""

    shared_experts = None
    shared_expert_gate = None
