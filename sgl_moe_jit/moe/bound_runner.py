# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A runner, and the very weights it was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import MoERunner, select_runner
from sgl_moe_jit.moe.topk import TopKOutput
from sgl_moe_jit.ops.library import has_no_values


def _memory(x: Tensor) -> tuple[Any, ...]:
    """Return what ``.data = `` and ``.to()`` change in a tensor that stays the same object."""
    return x.data_ptr(), x.dtype, x.device, x.shape, x.stride()


def _memories(
    up: Tensor, down: Tensor, up_scale: Tensor | None, down_scale: Tensor | None
) -> tuple[Any, ...]:
    if up_scale is None or down_scale is None:
        return _memory(up), _memory(down)
    return _memory(up), _memory(down), _memory(up_scale), _memory(down_scale)


def check_memory(weights: ExpertWeights) -> None:
    """Refuse weights without memory. Raises ValueError."""
    if weights.up.is_meta or weights.down.is_meta:
        raise ValueError(
            "experts: expected weights with memory, got device meta; give the module memory "
            "with .to_empty(device=...) and load its weights first"
        )


@dataclass(frozen=True)
class BoundRunner:
    """A runner made for some tensors at some addresses.

    Attributes:
        runner: The runner.
        weights: What it was made for.
        memory: Where both projections and their scales lay; empty of a runner made in traced code,
            which serves no other call.
    """

    runner: MoERunner
    weights: ExpertWeights
    memory: tuple[Any, ...]

    @classmethod
    def make(cls, name: str, weights: ExpertWeights) -> BoundRunner:
        """Select and make a runner.

        Raises:
            ValueError: unknown name, or weights without memory.
            UnsupportedError: the runner of that name cannot serve the layer.
        """
        check_memory(weights)
        config = RunnerConfig.of(weights)
        runner = select_runner(name, config).entry.bound(weights, config)
        memory: tuple[Any, ...] = ()
        # A tracer's sizes may be symbolic for weights with values too.
        if type(config.hidden_dim) is int and not has_no_values(weights.up, weights.down):
            memory = _memories(weights.up, weights.down, weights.up_scale, weights.down_scale)
        return cls(runner, weights, memory)

    def serves(
        self,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        up_scale: Tensor | None,
        down_scale: Tensor | None,
        activation: object,
        post_expert_norm: object,
    ) -> bool:
        """Whether these are still what the runner was made for, where it lay."""
        own = self.weights
        return (
            up is own.up
            and down is own.down
            and up_bias is own.up_bias
            and down_bias is own.down_bias
            and up_scale is own.up_scale
            and down_scale is own.down_scale
            and activation is own.activation
            and post_expert_norm is own.post_expert_norm
            and self.memory == _memories(up, down, up_scale, down_scale)
        )


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)  # NaN equals itself there


def copy_to_compare(mutates_input: bool, hidden_states: Tensor) -> Tensor | None:
    """Return a copy of an input that is not to change, for :func:`check_unchanged`.

    None without ``SGL_MOE_JIT_CHECK_MUTATION=1``, of an input that may change, and in traced code
    or a graph capture, where values cannot be compared.
    """
    if (
        mutates_input
        or torch.compiler.is_compiling()
        or not env.CHECK_MUTATION.get()
        or has_no_values(hidden_states)
        or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return None
    return hidden_states.detach().clone()


def check_unchanged(who: str, before: Tensor, hidden_states: Tensor) -> None:
    """Compare an input with its copy from before the call.

    Raises:
        RuntimeError: ``who`` declares ``mutates_input = False`` and wrote to it.
    """
    differs = (_bits(hidden_states) != _bits(before)).any(-1)
    if differs.any():
        changed = int(differs.sum())
        raise RuntimeError(
            f"{who}: declares mutates_input = False and changed {changed} of {before.shape[0]} "
            "rows of hidden_states, which shared experts would read; set mutates_input = True on it"
        )


def run_checked(
    runner: MoERunner, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None
) -> Tensor | DeferredFinalizeOutput:
    """Run, and with ``SGL_MOE_JIT_CHECK_MUTATION=1`` compare the input before and after.

    Raises:
        RuntimeError: a runner that declares ``mutates_input = False`` wrote to its input.
    """
    before = copy_to_compare(runner.mutates_input, hidden_states)
    output = runner.run(hidden_states, topk_output, defer=defer)
    if before is not None:
        check_unchanged(f"runner {runner.name!r}", before, hidden_states)
    return output
