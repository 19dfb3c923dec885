# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``PreparedMoE``: a layer around a runner whose weights the caller has prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.input_checks import described
from sgl_moe_jit.moe.layer_base import MoELayer
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import MoERunner, create_runner
from sgl_moe_jit.moe.topk import BypassedTopKOutput, TopKOutput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PreparedMoE(MoELayer):
    """The routed experts of one layer, behind a runner made by the caller.

    For runners that want weights in a layout of their own (quantized, shuffled). It has no
    parameters: a change of the original weights is seen when the caller prepares them again.
    Router logits go to the runner as they are, with the layer's expert numbers: whoever routes
    itself was told its first expert when it was made. Ids that come ready are made local here.

    Args:
        runner: The runner.
        config: Sizes and form of the weights it was made for.
        expert_range: See :class:`FusedMoE`, as are the rest.
        tp_group: Ranks that hold slices of each expert.
        ep_group: Ranks that hold the other experts.
        reduce_results: Whether :meth:`forward` sums its result over the groups.

    Raises:
        TypeError: ``runner`` or ``config`` is of another kind.
        ValueError: ``expert_range`` does not fit ``config``, or there is no group to reduce over.
    """

    def __init__(
        self,
        runner: MoERunner,
        config: RunnerConfig,
        *,
        expert_range: tuple[int, int] | None = None,
        tp_group: ProcessGroup | None = None,
        ep_group: ProcessGroup | None = None,
        reduce_results: bool = False,
    ) -> None:
        super().__init__()
        if not callable(getattr(runner, "run", None)) or isinstance(runner, type):
            raise TypeError(f"runner: expected a MoERunner, got {described(runner)}")
        if not isinstance(config, RunnerConfig):
            raise TypeError(f"config: expected a RunnerConfig, got {described(config)}")
        self._runner, self.config = runner, config
        self.num_local_experts = config.num_experts
        self.hidden_dim, self.intermediate_dim = config.hidden_dim, config.intermediate_dim
        self.has_gate = True
        self._place(expert_range, tp_group, ep_group, reduce_results)

    @classmethod
    def from_flashinfer(
        cls, weights: FlashInferWeights, *, runner: str = "auto", **options: Any
    ) -> PreparedMoE:
        """Build from weights prepared for FlashInfer.

        Args:
            weights: The weights.
            runner: Name of a runner, or ``"auto"``. Errors of ``create_runner``.
            **options: Of the class.
        """
        return cls(create_runner(runner, weights), weights.runner_config(), **options)

    @property
    def runner(self) -> MoERunner:
        """The runner."""
        return self._runner

    def _localize(self, topk_output: TopKOutput) -> TopKOutput:
        if isinstance(topk_output, BypassedTopKOutput):
            return topk_output
        return super()._localize(topk_output)

    def runner_config(self) -> RunnerConfig:
        """Return what the runner was made for."""
        return self.config
