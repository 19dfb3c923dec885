# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What every layer of routed experts does with its runner: deferral, slices, reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_moe_jit.moe.bound_runner import run_checked
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, finalize_output
from sgl_moe_jit.moe.expert_slice import ExpertRange, ReduceGroups
from sgl_moe_jit.moe.input_checks import refuse_jit_trace
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import (
    MoERunner,
    Support,
    as_standard,
    registered,
    runner_names,
    wants_defer,
)
from sgl_moe_jit.moe.runners.plan import RunnerPlan, explain
from sgl_moe_jit.moe.topk import TopKFormat, TopKOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CAN_DEFER = Support(True)


@dataclass(frozen=True)
class LayerExplanation:
    """Where a layer's slice belongs, which runner serves it, and why no other.

    Attributes:
        layer: The slice.
        runner: Name of its runner.
        plan: How the registry came to it; None for a runner that is not registered.
    """

    layer: str
    runner: str
    plan: RunnerPlan | None

    def __str__(self) -> str:
        return f"{self.layer}: {self.runner if self.plan is None else self.plan}"


def deferral_of(
    runner: MoERunner, config: Callable[[], RunnerConfig], topk_format: TopKFormat
) -> Support:
    """Say whether a runner of a layer hands over un-finalized rows, and why not."""
    if runner.can_defer(topk_format):
        return _CAN_DEFER
    sizes, name = config(), runner.name
    rule = registered(name).deferral if name in runner_names() else None
    why = "" if rule is None else rule(sizes, topk_format).why
    form = f"{topk_format.value} format, {sizes.describe()}"
    return Support(False, f"runner {name!r} finishes its own output: {why or form}")


class MoELayer(torch.nn.Module):
    """The routed experts of one layer, or one rank's slice of them, behind a runner.

    T tokens, K experts a token, H hidden size.

    Attributes:
        num_local_experts: On this rank, slots of shared experts included.
        num_fused_shared_experts: How many of them, the last ones, are slots of shared experts.
        hidden_dim: H.
        intermediate_dim: Width of an expert.
        has_gate: Whether experts have a gate.
        expert_range: This rank's experts among the layer's, or None: all of them.
        groups: Over which the output is a sum of parts.
        reduce_results: Whether :meth:`forward` sums its result over them.
    """

    num_local_experts: int
    num_fused_shared_experts: int = 0
    hidden_dim: int
    intermediate_dim: int
    has_gate: bool
    expert_range: ExpertRange | None
    groups: ReduceGroups
    reduce_results: bool

    def _place(
        self,
        expert_range: tuple[int, int] | None,
        tp_group: ProcessGroup | None,
        ep_group: ProcessGroup | None,
        reduce_results: bool,
    ) -> None:
        """Remember where this slice belongs. Errors as of :class:`FusedMoE`."""
        self.expert_range = None if expert_range is None else ExpertRange(*expert_range)
        if self.expert_range is not None and self.expert_range.count != self.num_local_experts:
            raise ValueError(
                f"expert_range: expected count {self.num_local_experts}, the experts given, got "
                f"{self.expert_range.count}"
            )
        self.groups = ReduceGroups(tp_group, ep_group)
        self.reduce_results = reduce_results
        if reduce_results and not self.groups.given:
            raise ValueError("reduce_results: expected a tp_group or an ep_group to reduce over")

    @property
    def runner(self) -> MoERunner:
        """The runner that serves the next call."""
        raise NotImplementedError

    @property
    def mutates_input(self) -> bool:
        """Whether a call may overwrite its ``hidden_states``."""
        return self.runner.mutates_input

    def supports_deferred_finalize(self, topk_format: TopKFormat = TopKFormat.STANDARD) -> Support:
        """Say whether rows can be handed over un-finalized for a routing format, and why not."""
        return self.deferral_support(self.runner, topk_format)

    def deferral_support(self, runner: MoERunner, topk_format: TopKFormat) -> Support:
        """Say the same of a runner at hand, which is not looked up again."""
        return deferral_of(runner, self.runner_config, topk_format)

    def runner_config(self) -> RunnerConfig:
        """Return what the choice of a runner depends on."""
        raise NotImplementedError

    def _localize(self, topk_output: TopKOutput) -> TopKOutput:
        if self.expert_range is None:
            return topk_output
        return self.expert_range.localize(as_standard(topk_output))

    def _run(
        self, hidden_states: Tensor, topk_output: TopKOutput, defer: bool
    ) -> Tensor | DeferredFinalizeOutput:
        refuse_jit_trace()
        return run_checked(self.runner, hidden_states, self._localize(topk_output), defer=defer)

    def forward(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = False
    ) -> Tensor | DeferredFinalizeOutput:
        """Run the experts.

        Args:
            hidden_states: [T, H]; overwritten by a runner that declares ``mutates_input``.
            topk_output: The router's choice among all of the layer's experts, in any format.
            defer: True is :meth:`forward_deferred_finalize`. The default never hands over
                un-finalized rows, also inside ``deferred_finalize_context``; None reads that
                context, outside traced code only.

        Returns:
            [T, H], dtype of the weights; summed over the groups with ``reduce_results``, else this
            rank's part.

        Raises:
            UnsupportedError: no runner serves these weights, or inside ``torch.jit.trace``.
            RuntimeError: ``reduce_results`` of a result with a gradient; or the runner wrote to its
                input against its word, with ``SGL_MOE_JIT_CHECK_MUTATION=1``.
            TypeError, ValueError: inputs do not fit; see :class:`MoERunner`.
        """
        if wants_defer(defer):
            return self._run(hidden_states, topk_output, defer=True)
        output = finalize_output(self._run(hidden_states, topk_output, defer=False))
        return self.groups.reduce(output) if self.reduce_results else output

    def forward_deferred_finalize(
        self, hidden_states: Tensor, topk_output: TopKOutput
    ) -> Tensor | DeferredFinalizeOutput:
        """Run the experts and leave their weighted sum to the caller.

        Finish either answer with ``finalize_output``. It is this rank's part in both cases, with
        ``reduce_results`` too: a caller that adds the shared experts reduces after that, with
        :meth:`reduce`.

        Returns:
            :class:`DeferredFinalizeOutput`, or a finished [T, H] where the runner cannot defer.
        """
        return self(hidden_states, topk_output, defer=True)  # type: ignore[no-any-return]

    def reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the groups, in place, and return it; as it is without groups."""
        return self.groups.reduce(x)

    def explain(self) -> LayerExplanation:
        """Return which runner serves the next call, and why no other."""
        part, name = self.expert_range, self.runner.name
        layer = f"{type(self).__name__}, {self.groups}"
        if part is not None:
            layer += f", the layer's experts {part.first} to {part.first + part.count - 1}"
        plan = explain(self.runner_config(), name) if name in runner_names() else None
        return LayerExplanation(layer, name, plan)
