# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a block finds out about its parts before a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from sgl_moe_jit.moe.block_gates import StreamFacts
from sgl_moe_jit.moe.bound_runner import check_unchanged, copy_to_compare
from sgl_moe_jit.moe.input_checks import check_callable, refuse_jit_trace
from sgl_moe_jit.moe.layer_base import MoELayer
from sgl_moe_jit.moe.runners.base import MoERunner, Support
from sgl_moe_jit.moe.shared_order import BlockShape, shared_width_of
from sgl_moe_jit.moe.topk import (
    BypassedTopKOutput,
    PackedTopKOutput,
    StandardTopKOutput,
    TopKFormat,
    TopKOutput,
)

_hooks = torch.nn.modules.module


def check_parts(
    experts: Any, shared_experts: Any, shared_expert_gate: Any, shared_is_fused: bool
) -> None:
    """Refuse parts of a block that contradict each other.

    Raises:
        TypeError: a part is neither a module nor a function; names it.
        ValueError: names the part.
    """
    check_callable("experts", experts)
    check_callable("shared_experts", shared_experts, optional=True)
    check_callable("shared_expert_gate", shared_expert_gate, optional=True)
    if shared_expert_gate is not None and shared_experts is None:
        raise ValueError("shared_expert_gate: expected None without shared_experts")
    if getattr(experts, "reduce_results", False):
        raise ValueError(
            "experts: expected reduce_results=False, since their output is reduced after the "
            "shared output is added; pass reduce_results to the block"
        )
    num_slots = getattr(experts, "num_fused_shared_experts", 0)
    if num_slots and shared_experts is not None and not shared_is_fused:
        raise ValueError(
            f"shared_is_fused: expected True, since the experts hold {num_slots} shared slots, "
            "or the shared experts would count twice; got False"
        )


def correction_biases(gate: Any) -> list[torch.Tensor]:
    """Return a gate's correction biases in float32, under the name that models have for them."""
    if not isinstance(gate, torch.nn.Module):
        return []
    return [
        x
        for name, x in (*gate.named_parameters(), *gate.named_buffers())
        if name.endswith("e_score_correction_bias") and x.dtype == torch.float32
    ]


def adjacent_columns(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as kernels read it; a copy only where columns lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def checked_topk(topk_output: Any) -> TopKOutput:
    """Return a router's output, or say what a gate has to return instead.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(topk_output, (StandardTopKOutput, BypassedTopKOutput, PackedTopKOutput)):
        return topk_output
    raise TypeError(
        "gate: expected a StandardTopKOutput, BypassedTopKOutput or PackedTopKOutput, got "
        f"{type(topk_output).__name__}; pass read_gate= to turn one into the other"
    )


class DirectGate(Protocol):
    """A block's ``read_gate`` that knows how some gates route, and can do it in their place."""

    def __call__(self, output: Any) -> TopKOutput:
        """Turn what the gate returned into a router's output."""

    def route(self, gate: Any, x: torch.Tensor) -> tuple[TopKOutput | None, str]:
        """Return the router's output and how it came about, or None and why the gate is called."""


def route(block: Any, x: torch.Tensor) -> TopKOutput:
    """Return the router's output of one call, outside traced code by a ``DirectGate`` if it can.

    Raises:
        TypeError: the gate does not return a router's output.
    """
    read: Any = block.read_gate
    if not torch.compiler.is_compiling() and hasattr(read, "route"):
        topk_output: TopKOutput | None
        topk_output, block.__dict__["_routed_by"] = read.route(block.gate, x)
        if topk_output is not None:
            return topk_output
    output = block.gate(x)
    return checked_topk(output if read is None else read(output))


def call_as_is(experts: Any, call: Call, topk_output: TopKOutput) -> torch.Tensor:
    """Call experts that are no layer of this library, and check what they say of their input.

    Raises:
        RuntimeError: see :func:`check_unchanged`.
    """
    before = copy_to_compare(call.experts.mutates_input, call.x)
    output: torch.Tensor = experts(call.x, topk_output)
    if before is not None:
        check_unchanged(f"experts, a {type(experts).__name__}", before, call.x)
    return output


def top_k_of(topk_output: TopKOutput) -> int:
    """Return K."""
    if isinstance(topk_output, StandardTopKOutput):
        return topk_output.topk_ids.shape[-1]
    if isinstance(topk_output, PackedTopKOutput):
        return topk_output.packed_ids.shape[-1]
    return topk_output.router_config.top_k


class ExpertsFacts(NamedTuple):
    """What a block has to know of its experts in one call.

    Attributes:
        runner: The runner that will serve the call; None: a module that is called as it is.
        mutates_input: Whether they may overwrite their input.
        refusal: Why they cannot be asked for un-finalized rows; empty when they can.
        support: Says whether the runner can defer a routing format.
        intermediate_dim: Width of an expert; 0: not known.
        has_gate: Whether experts have a gate.
        hidden_dim: H; 0: not known.
    """

    runner: MoERunner | None
    mutates_input: bool
    refusal: str
    support: Callable[[TopKFormat], Support]
    intermediate_dim: int
    has_gate: bool
    hidden_dim: int = 0

    @classmethod
    def as_is(cls, experts: Any, refusal: str, *, mutates_input: bool) -> ExpertsFacts:
        """Return the facts of experts that are called as they are."""
        finished = Support(False, f"{type(experts).__name__} finishes its own output")
        return cls(None, mutates_input, refusal, lambda _: finished, 0, False)

    @classmethod
    def of(cls, experts: Any) -> ExpertsFacts:
        """Return the facts of a layer of this library, or of anything else.

        Raises:
            UnsupportedError: a layer of this library inside ``torch.jit.trace``.
        """
        if not isinstance(experts, MoELayer):
            # Who does not say whether it overwrites its input, may.
            mutates = bool(getattr(experts, "mutates_input", True))
            refusal = f"a {type(experts).__name__}, called as it is"
            return cls.as_is(experts, refusal, mutates_input=mutates)
        refuse_jit_trace()
        runner = experts.runner
        return cls(
            runner,
            bool(getattr(runner, "mutates_input", True)),
            watched(experts),
            lambda topk_format: experts.deferral_support(runner, topk_format),
            experts.intermediate_dim,
            experts.has_gate,
            # A hook in front of them may give them something else.
            0 if experts._forward_pre_hooks else experts.hidden_dim,
        )


@dataclass(frozen=True)
class Call:
    """One call: its input, and what is known before the router ran.

    Attributes:
        x: [T, H].
        outer: The same, as router and shared experts get it.
        no_shared: Why no shared experts run; empty when they do.
        experts: What is known of them.
        defer: The caller's argument.
        stream: None in traced code.
    """

    x: torch.Tensor
    outer: torch.Tensor
    no_shared: str
    experts: ExpertsFacts
    defer: bool | None
    stream: StreamFacts | None


def watched(experts: torch.nn.Module) -> str:
    """Return who looks at the experts' output from outside; empty when nobody does.

    A hook or a wrapper expects a tensor.
    """
    if "forward" in experts.__dict__:
        return "their forward is replaced on the instance"
    return hooked(experts)


def hooked(experts: torch.nn.Module) -> str:
    """Return whether one of torch's hooks looks at the experts' output; empty when none does."""
    if (
        experts._forward_hooks
        or experts._backward_hooks
        or experts._backward_pre_hooks
        or _hooks._global_forward_hooks
        or _hooks._global_backward_hooks
        or _hooks._global_backward_pre_hooks
    ):
        return "a hook on them expects a tensor"
    return ""


def needs_grad(block: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether a call with this input may be differentiated."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(p.requires_grad for p in block.parameters())


def shape_of(experts: ExpertsFacts, x: torch.Tensor, top_k: int, shared_width: int) -> BlockShape:
    """Return the sizes of a call, for the memory model."""
    num_tokens, hidden_dim = x.shape
    return BlockShape(
        num_tokens=num_tokens,
        top_k=top_k,
        hidden_dim=hidden_dim,
        intermediate_dim=experts.intermediate_dim,
        shared_width=shared_width,
        item_size=x.element_size(),
        has_gate=experts.has_gate,
    )


def shared_width(shared_experts: Any, hidden_dim: int) -> int:
    """Return the elements a token that shared experts hold at once; 0 for a plain function."""
    if not isinstance(shared_experts, torch.nn.Module):
        return 0
    return shared_width_of([tuple(p.shape) for p in shared_experts.parameters()], hidden_dim)
