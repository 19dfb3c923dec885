# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``FusedMoE``: one layer's routed experts as a module that holds their parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sgl_moe_jit.moe.bound_runner import BoundRunner
from sgl_moe_jit.moe.expert_parameters import ExpertParameters, ParameterNames
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.layer_base import LayerExplanation, MoELayer
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import MoERunner
from sgl_moe_jit.moe.runners.plan import explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedMoE(ExpertParameters, MoELayer):
    """The routed experts of one layer, or one rank's slice of them.

    Parameters are looked up by name in every call, so each call sees every change: ``copy_``,
    ``load_state_dict``, an optimizer's step, ``.data =``, ``.to()``, a replaced or parametrized
    parameter (PEFT's ``target_parameters``). A captured CUDA graph sees those that write in place;
    after one that moves a weight to another address it has to be captured again. See
    :class:`ExpertParameters` for how they are held, :class:`MoELayer` for calls.

    Args:
        weights: The parameters, their declared layout and the activation.
        names: Names of the parameters; None: transformers'.
        runner: Name of a runner, or ``"auto"``.
        expert_range: (first, count): this rank's experts among the layer's, which routers number.
            None: all are here.
        tp_group: Ranks that hold slices of each expert.
        ep_group: Ranks that hold the other experts.
        reduce_results: Whether :meth:`forward` sums its result over the groups. In a
            ``SharedExpertMoEBlock`` leave it off: the block reduces.

    Raises:
        ValueError: shapes do not belong together, ``expert_range`` does not fit them, a tensor
            cannot be registered, or there is no group to reduce over.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        names: ParameterNames | None = None,
        runner: str = "auto",
        expert_range: tuple[int, int] | None = None,
        tp_group: ProcessGroup | None = None,
        ep_group: ProcessGroup | None = None,
        reduce_results: bool = False,
    ) -> None:
        super().__init__(weights, names=names)
        self.runner_name = runner
        self._bound: BoundRunner | None = None
        self._place(expert_range, tp_group, ep_group, reduce_results)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the runner, which holds views of these very parameters."""
        return {**self.__dict__, "_bound": None}

    def _bind(self) -> BoundRunner:
        if torch.compiler.is_compiling():
            return BoundRunner.make(self.runner_name, self.expert_weights())
        bound = self._bound
        if bound is None or not bound.serves(
            *self.tensors(), self.activation, self.post_expert_norm
        ):
            bound = self._bound = BoundRunner.make(self.runner_name, self.expert_weights())
        return bound

    @property
    def runner(self) -> MoERunner:
        """The runner that serves the current parameters. Errors of ``create_runner``."""
        return self._bind().runner

    def runner_config(self) -> RunnerConfig:
        """Return what the choice of a runner depends on."""
        return RunnerConfig.of(self.expert_weights())

    def explain(self) -> LayerExplanation:
        """Return which runner serves the current parameters, and why no other."""
        plan = explain(self.runner_config(), self.runner_name)
        return replace(super().explain(), plan=plan)
