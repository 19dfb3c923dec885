# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of a runner, and the registry that picks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.config import ExpertWeights, MoEConfig
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, is_deferred_finalize_enabled
from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKFormat


@dataclass(frozen=True)
class Support:
    """Whether a runner can serve a layer, and why not."""

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
        self, hidden_states: Tensor, topk_output: StandardTopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """Return the layer's routed output.

        Args:
            hidden_states: [T, H].
            topk_output: The router's choice.
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
        supports: Says whether a layer can be served; starts nothing.
        create: Binds the runner to a layer's weights.
    """

    name: str
    supports: Callable[[MoEConfig], Support]
    create: Callable[[ExpertWeights], MoERunner]


@dataclass(frozen=True)
class Selection:
    """What ``auto`` chose, and why the runners before it were refused."""

    entry: RunnerEntry
    refused: tuple[tuple[str, str], ...]


_registry: dict[str, RunnerEntry] = {}
# Fastest first; `native` serves everything.
_AUTO_ORDER = ("grouped_mm", "native")


def register_runner(entry: RunnerEntry) -> None:
    """Add a runner to the registry. ``auto`` considers only this library's own."""
    if entry.name == "auto":
        raise ValueError("name: 'auto' is reserved")
    _registry[entry.name] = entry


def runner_names() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(_registry)


def select_runner(name: str, config: MoEConfig) -> Selection:
    """Return the runner of that name, or the first of ``auto``'s order that supports the layer.

    Raises:
        ValueError: unknown name.
        UnsupportedError: a runner asked for by name cannot serve the layer; says why.
    """
    if name != "auto":
        if name not in _registry:
            known = ", ".join(("auto", *_registry))
            raise ValueError(f"runner: expected one of {known}, got {name!r}")
        support = _registry[name].supports(config)
        if not support.ok:
            raise UnsupportedError(f"runner {name!r} cannot serve this layer: {support.why}")
        return Selection(_registry[name], ())
    refused: list[tuple[str, str]] = []
    for candidate in _AUTO_ORDER:
        if candidate not in _registry:
            continue
        support = _registry[candidate].supports(config)
        if support.ok:
            return Selection(_registry[candidate], tuple(refused))
        refused.append((candidate, support.why))
    raise UnsupportedError(f"no runner serves this layer: {refused}")


def create_runner(name: str, weights: ExpertWeights) -> MoERunner:
    """Return a runner bound to a layer's weights. See :func:`select_runner` for errors."""
    return select_runner(name, MoEConfig.of(weights)).entry.create(weights)


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


def check_topk(hidden_states: Tensor, topk_output: StandardTopKOutput, hidden_dim: int) -> None:
    """Check the shapes a runner relies on.

    Raises:
        TypeError: ``topk_ids`` is not int32 or int64, or ``topk_weights`` is not floating.
        ValueError: shapes disagree; names argument, expected and got.
    """
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden_dim:
        raise ValueError(
            f"hidden_states: expected [num_tokens, {hidden_dim}], got {tuple(hidden_states.shape)}"
        )
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids: expected int32 or int64, got {ids.dtype}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights: expected a floating dtype, got {weights.dtype}")
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"topk_ids: expected [{hidden_states.shape[0]}, top_k], got {tuple(ids.shape)}"
        )
    if weights.shape != ids.shape:
        raise ValueError(f"topk_weights: expected {tuple(ids.shape)}, got {tuple(weights.shape)}")
