# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which runner ``auto`` takes for some weights, remembered without the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.bound_runner import check_memory
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import MoERunner, RunnerEntry, select_runner


def _matrix(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device


def _scale(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.dtype, x.device)


def _facts(weights: ExpertWeights) -> tuple[Any, ...]:
    """Return all that ``RunnerConfig.of`` reads."""
    facts = (
        weights.is_transposed,
        weights.has_gate,
        *_matrix(weights.up),
        *_matrix(weights.down),
    )
    if weights.up_scale is None and weights.down_scale is None:
        return facts
    return *facts, _scale(weights.up_scale), _scale(weights.down_scale)


@dataclass(frozen=True)
class RunnerChoice:
    """The choice for weights of one form: sizes, strides, dtypes, devices, flags.

    It holds no tensor, so a weight that is replaced is let go at once. A runner is made for each
    call, of the weights as they are then, so none is stale.

    Attributes:
        facts: What the choice depends on.
        entry: The runner.
        config: What it was chosen for.
    """

    facts: tuple[Any, ...]
    entry: RunnerEntry
    config: RunnerConfig

    @classmethod
    def of(cls, weights: ExpertWeights, known: RunnerChoice | None = None) -> RunnerChoice:
        """Return ``known`` if that is the choice for these weights, else a new one.

        Raises:
            ValueError: weights without memory.
        """
        if torch.compiler.is_compiling():  # where an offset cannot be read
            facts: tuple[Any, ...] = ()
        else:
            facts = _facts(weights)
            if known is not None and known.facts == facts:
                return known
        check_memory(weights)
        config = RunnerConfig.of(weights)
        return cls(facts, select_runner("auto", config).entry, config)

    def runner(self, weights: ExpertWeights) -> MoERunner:
        """Return the runner for weights of this form."""
        return self.entry.bound(weights, self.config)
