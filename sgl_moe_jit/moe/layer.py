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
from sgl_moe_jit.moe.loaders import loader_of
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

    float8_e4m3fn weights bring their scales as parameters, named ``..._scale``, and are for
    inference only.

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
        num_fused_shared_experts: How many of the last experts are slots of the shared experts.

    Raises:
        ValueError: shapes do not belong together, ``expert_range`` does not fit them, a tensor
            cannot be registered, there is no group to reduce over, or more shared slots than
            experts.
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
        num_fused_shared_experts: int = 0,
    ) -> None:
        super().__init__(weights, names=names)
        if not 0 <= num_fused_shared_experts <= self.num_local_experts:
            raise ValueError(
                f"num_fused_shared_experts: expected 0 to {self.num_local_experts}, the experts "
                f"given, got {num_fused_shared_experts}"
            )
        self.num_fused_shared_experts = num_fused_shared_experts
        self.runner_name = runner
        self._bound: BoundRunner | None = None
        self._place(expert_range, tp_group, ep_group, reduce_results)

    @classmethod
    def from_transformers(
        cls,
        block: torch.nn.Module,
        ep_rank: int = 0,
        ep_size: int = 1,
        fuse_shared: bool = True,
        **options: Any,
    ) -> FusedMoE:
        """Build one rank's experts of a transformers MoE block, its shared experts among them.

        The rank has L routed experts in slots 0 to L - 1 and the shared MLP, of S times their
        width, in slots L to L + S - 1, as :class:`sgl_moe_jit.ep.EpLayout` numbers them. The
        layer's ids are these slots, which a dispatcher delivers; with ``expert_range=(ep_rank *
        (L + S), L + S)`` they are ids of all ranks' slots. Every rank holds all of the shared MLP;
        a token's shared experts belong to one rank, and the block's own MLP must not be called
        beside (``SharedExpertMoEBlock(shared_is_fused=True)``).

        Weights are copied, and the layer holds this rank's alone: ``block`` may go afterwards,
        unless its experts have a gate function of their own, which stays in use.

        Args:
            block: Of the kinds that ``load_block`` of :mod:`sgl_moe_jit.integrations.transformers`
                knows. It is only read.
            ep_rank: This rank.
            ep_size: Ranks.
            fuse_shared: Whether the shared experts become slots. False: routed experts alone.
            **options: num_redundant and physical_to_logical: replicas of routed experts, and the
                expert in each slot of all ranks (see :meth:`EpLayout.slot_sources`). The rest: of
                the class.

        Raises:
            TypeError: ``block`` is not a module, or ``fuse_shared`` no bool.
            UnsupportedError: the block is not known, has hooks, or its shared experts cannot be
                slots (a gate, another width, activation or dtype); says why.
            ValueError: rank, size and experts do not fit; see :class:`EpLayout`.
            ImportError: transformers is missing or too old.
        """
        if not isinstance(fuse_shared, bool):
            raise TypeError(f"fuse_shared: expected a bool, got {fuse_shared!r}")
        loader = loader_of("transformers")
        return loader(cls, block, ep_rank, ep_size, fuse_shared, **options)

    def extra_repr(self) -> str:
        """Return sizes and layout, for ``repr``."""
        shared = self.num_fused_shared_experts
        return super().extra_repr() + (f", of them shared={shared}" if shared else "")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the runner, which holds views of these very parameters."""
        return {**self.__dict__, "_bound": None}

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register, and let go the runner, which holds the parameter of that name before.

        Every assignment comes here, that of ``load_state_dict(assign=True)`` included.
        """
        self.__dict__["_bound"] = None
        super().register_parameter(name, param)

    def _bind(self) -> BoundRunner:
        if torch.compiler.is_compiling():
            return BoundRunner.make(self.runner_name, self.expert_weights())
        bound = self._bound
        if bound is not None and bound.serves(
            *self.tensors(), self.activation, self.post_expert_norm
        ):
            return bound
        bound = BoundRunner.make(self.runner_name, self.expert_weights())
        # Others are made for one call (by a parametrization, functional_call, a tracer) and gone
        # after it.
        kept = (bound.weights.up, bound.weights.down)
        lasting = bound.memory and all(isinstance(x, torch.nn.Parameter) for x in kept)
        self._bound = bound if lasting else None
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
