# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which runner would serve a layer, and why: a plan to read, made without making a runner."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import (
    AUTO_ORDER,
    Support,
    config_of,
    registered,
    runner_names,
)
from sgl_moe_jit.moe.topk import TopKFormat


@dataclass(frozen=True)
class RunnerPlan:
    """The choice of a runner. ``str()`` gives it in lines, like a query plan.

    Attributes:
        asked: Name that was asked for.
        config: The layer.
        topk_format: How the router's choice travels.
        runner: Name of the chosen runner; None: none serves the layer.
        reason: Why this one, or why none.
        refused: (name, why) of every runner that cannot serve the layer.
        also: Names of the others that can, behind it in ``auto``'s order or registered by users.
        can_defer: Whether it can hand over its rows un-finalized.
        deferral: Why not, or on what grounds.
    """

    asked: str
    config: RunnerConfig
    topk_format: TopKFormat
    runner: str | None
    reason: str
    refused: tuple[tuple[str, str], ...]
    also: tuple[str, ...]
    can_defer: bool
    deferral: str

    def __str__(self) -> str:
        yes = "yes" if self.can_defer else "no"
        lines = [
            f"{self.runner or 'no runner'} (asked for: {self.asked})",
            f"  layer     {self.config.describe()}",
            f"  because   {self.reason}",
            f"  deferral  {yes}, topk format {self.topk_format.value}"
            + (f": {self.deferral}" if self.deferral else ""),
        ]
        lines += [f"  refused   {name}: {why}" for name, why in self.refused]
        if self.also:
            lines.append(f"  also able {', '.join(self.also)}")
        return "\n".join(lines)


def explain(
    layer: RunnerConfig | ExpertWeights | FlashInferWeights,
    runner: str = "auto",
    topk_format: TopKFormat = TopKFormat.STANDARD,
) -> RunnerPlan:
    """Return the plan for a layer, without making a runner. What cannot be served does not raise.

    A :class:`RunnerConfig` with layout ``any`` asks which runner to prepare weights for. FlashInfer
    is imported when everything else speaks for it.

    Args:
        layer: Sizes, or the weights.
        runner: Name, or ``auto``.
        topk_format: How the router's choice travels.

    Raises:
        ValueError: unknown name.
    """
    config = layer if isinstance(layer, RunnerConfig) else config_of(layer)
    if runner != "auto":
        registered(runner)
    order = [name for name in AUTO_ORDER if name in runner_names()]
    names = [*order, *(name for name in runner_names() if name not in order)]
    supports = {name: registered(name).support(config) for name in names}
    candidates = order if runner == "auto" else [runner]
    chosen = next((name for name in candidates if supports[name].ok), None)
    can_defer = Support(False, "no runner")
    if chosen is not None:
        rule = registered(chosen).deferral
        unknown = Support(False, "not known before the runner is made")
        can_defer = unknown if rule is None else rule(config, topk_format)
    return RunnerPlan(
        asked=runner,
        config=config,
        topk_format=topk_format,
        runner=chosen,
        reason=_reason(runner, chosen, order, supports),
        refused=tuple((name, s.why) for name, s in supports.items() if not s.ok),
        also=tuple(name for name, s in supports.items() if s.ok and name != chosen),
        can_defer=can_defer.ok,
        deferral=can_defer.why,
    )


def _reason(asked: str, chosen: str | None, order: list[str], supports: dict[str, Support]) -> str:
    if chosen is None:
        return (
            f"none of {', '.join(order)} can serve it" if asked == "auto" else supports[asked].why
        )
    grounds = f": {supports[chosen].why}" if supports[chosen].why else ""
    if asked != "auto":
        return f"asked for by name{grounds}"
    return f"first of {', '.join(order)} that can serve it{grounds}"
