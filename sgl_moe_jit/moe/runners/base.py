# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of a runner, and the registry that picks one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, is_deferred_finalize_enabled
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.input_checks import described
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.topk import (
    BypassedTopKOutput,
    PackedTopKOutput,
    StandardTopKOutput,
    TopKFormat,
    TopKOutput,
)


@dataclass(frozen=True)
class Support:
    """Whether a runner can serve a layer, and why not; or on what grounds."""

    ok: bool
    why: str = ""


class MoERunner(Protocol):
    """Runs one layer's experts.

    Attributes:
        name: Name in the registry.
        mutates_input: Whether ``run`` may overwrite ``hidden_states``.
    """

    name: str
    mutates_input: bool

    def can_defer(self, topk_format: TopKFormat) -> bool:
        """Return whether ``run`` can hand over its rows un-finalized for this format."""
        ...

    def run(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """Return the layer's routed output.

        Args:
            hidden_states: [T, H].
            topk_output: The router's choice, in any format.
            defer: Whether to hand over un-finalized rows. None reads ``deferred_finalize_context``,
                which works outside traced code only.

        Returns:
            [T, H] tensor, or :class:`DeferredFinalizeOutput` when asked for and possible.
        """
        ...


@dataclass(frozen=True)
class RunnerEntry:
    """One registered runner.

    Attributes:
        name: In the registry.
        supports: Says whether a layer in this layout can be served; starts nothing.
        create: Binds the runner to a layer's weights.
        bind: The same for weights whose config is at hand and was found to be supported, which
            saves looking again; None: ``create``.
        layout: Of the weights it reads, as in :class:`RunnerConfig`.
        quantizations: Forms of weights it reads.
        deferral: Says whether un-finalized rows are handed over for a format; None: not known
            before the runner is made.
    """

    name: str
    supports: Callable[[RunnerConfig], Support]
    create: Callable[[Any], MoERunner]
    layout: str = "plain"
    quantizations: tuple[Quantization, ...] = (Quantization.NONE,)
    deferral: Callable[[RunnerConfig, TopKFormat], Support] | None = None
    bind: Callable[[Any, RunnerConfig], MoERunner] | None = None

    def bound(self, weights: Any, config: RunnerConfig) -> MoERunner:
        """Return the runner for weights of a config that it supports."""
        return self.create(weights) if self.bind is None else self.bind(weights, config)

    def reads(self, config: RunnerConfig) -> Support:
        """Say whether the weights are, or can be put, in the layout that this runner reads."""
        if config.layout not in (self.layout, "any"):
            return Support(
                False,
                f"weights: needs layout {self.layout}, got {config.layout}; prepare them for it",
            )
        return Support(True)

    def support(self, config: RunnerConfig) -> Support:
        """Say whether this runner can serve a layer, and why not."""
        support = self.reads(config)
        if support.ok and config.quantization not in self.quantizations:
            served = ", ".join(map(str, self.quantizations))
            why = f"quantization: serves {served}, got {config.quantization}"
            support = Support(False, why)
        return self.supports(config) if support.ok else support


@dataclass(frozen=True)
class Selection:
    """What ``auto`` chose, and why the runners before it that read this layout were refused."""

    entry: RunnerEntry
    refused: tuple[tuple[str, str], ...]


_registry: dict[str, RunnerEntry] = {}
# Fastest first; `native` serves everything that is not quantized.
AUTO_ORDER = ("flashinfer_trtllm", "flashinfer_cutlass", "grouped_mm", "native")
_log = logging.getLogger("sgl_moe_jit.moe")
_logged: set[str] = set()


def register_runner(entry: RunnerEntry) -> None:
    """Add a runner to the registry. ``auto`` considers only this library's own.

    Raises:
        TypeError: not a :class:`RunnerEntry`.
        ValueError: its name is taken by ``auto``.
    """
    if not isinstance(entry, RunnerEntry):
        raise TypeError(f"entry: expected a RunnerEntry, got {described(entry)}")
    if entry.name == "auto":
        raise ValueError("name: 'auto' is reserved")
    _registry[entry.name] = entry


def runner_names() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(_registry)


def registered(name: str) -> RunnerEntry:
    """Return a registered runner.

    Raises:
        ValueError: unknown name.
    """
    if name not in _registry:
        known = ", ".join(("auto", *_registry))
        raise ValueError(f"runner: expected one of {known}, got {name!r}")
    return _registry[name]


def select_runner(name: str, config: RunnerConfig) -> Selection:
    """Return the runner of that name, or the first of ``auto``'s order that supports the layer.

    Raises:
        ValueError: unknown name.
        UnsupportedError: a runner asked for by name cannot serve the layer; says why.
    """
    if name != "auto":
        support = registered(name).support(config)
        if not support.ok:
            raise UnsupportedError(f"runner {name!r} cannot serve this layer: {support.why}")
        return Selection(_registry[name], ())
    refused: list[tuple[str, str]] = []
    for candidate in AUTO_ORDER:
        entry = _registry.get(candidate)
        if entry is None or not entry.reads(config).ok:
            continue
        support = entry.support(config)
        if support.ok:
            selection = Selection(entry, tuple(refused))
            _log_once(config, selection)
            return selection
        refused.append((candidate, support.why))
    reasons = "; ".join(f"{runner}: {why}" for runner, why in refused)
    raise UnsupportedError(f"no runner serves this layer: {reasons}")


def _log_once(config: RunnerConfig, selection: Selection) -> None:
    if torch.compiler.is_compiling():
        return
    passed = "".join(f"; {runner} refused: {why}" for runner, why in selection.refused)
    line = f"runner auto: {selection.entry.name} for {config.describe()}{passed}"
    if line not in _logged:
        _logged.add(line)
        _log.info(line)


def create_runner(name: str, weights: ExpertWeights | FlashInferWeights) -> MoERunner:
    """Return a runner bound to a layer's weights. See :func:`select_runner` for errors."""
    config = config_of(weights)
    return select_runner(name, config).entry.bound(weights, config)


def config_of(weights: ExpertWeights | FlashInferWeights) -> RunnerConfig:
    """Return what decides which runner can serve these weights."""
    if isinstance(weights, FlashInferWeights):
        return weights.runner_config()
    return RunnerConfig.of(weights)


def wants_defer(defer: bool | None) -> bool:
    """Resolve ``run``'s ``defer``: the argument, or the context when it is None.

    Raises:
        RuntimeError: None in code traced by ``torch.compile``, where the context cannot be read.
    """
    if defer is not None:
        return defer
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "defer: pass True or False in compiled code; deferred_finalize_context cannot be traced"
        )
    return is_deferred_finalize_enabled()


def can_finalize(top_k: int) -> bool:
    """Return whether the fused op takes this number of slots a token."""
    return 1 <= top_k <= 64


def as_standard(topk_output: TopKOutput) -> StandardTopKOutput:
    """Return ids and weights, whatever the format: the one place that converts.

    Raises:
        TypeError: not an output of a router.
        TypeError, ValueError: bypassed, see :func:`sgl_moe_jit.select_experts`.
    """
    if isinstance(topk_output, StandardTopKOutput):
        return topk_output
    if isinstance(topk_output, (BypassedTopKOutput, PackedTopKOutput)):
        return topk_output.to_standard()
    raise TypeError(
        "topk_output: expected a StandardTopKOutput, BypassedTopKOutput or PackedTopKOutput, got "
        f"{type(topk_output).__name__}"
    )
