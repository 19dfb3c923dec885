# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How a block runs one call: every condition, what was found, and what follows from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from sgl_moe_jit import env
from sgl_moe_jit.moe.runners.base import Support
from sgl_moe_jit.moe.shared_order import BlockShape, Order, OrderChoice, choose_order
from sgl_moe_jit.moe.topk import TopKFormat


@dataclass(frozen=True)
class Check:
    """One condition: whether it holds, and what was found either way."""

    name: str
    ok: bool
    found: str

    def __str__(self) -> str:
        return f"{self.name}: {'ok' if self.ok else 'no'}, {self.found}"


class StreamFacts(NamedTuple):
    """What decides whether the shared experts get a stream of their own.

    Attributes:
        wanted: Setting: True, False, or None for few tokens inside a CUDA graph capture only.
        device: Type of the device.
        capturing: Whether the current stream is being captured.
        needs_grad: Whether this call may need gradients.
        mutates_input: Whether the runner may overwrite its input.
        no_shared: Why no shared experts run in this call; empty when they do.
        num_tokens: T.
        max_tokens: ``SGL_MOE_JIT_DUAL_STREAM_MAX_TOKENS``.
    """

    wanted: bool | None
    device: str
    capturing: bool
    needs_grad: bool
    mutates_input: bool
    no_shared: str
    num_tokens: int
    max_tokens: int

    @property
    def is_set(self) -> bool:
        """Whether the setting, or what it leaves to the call, asks for a second stream."""
        if self.wanted is not None:
            return self.wanted
        return self.capturing and (self.max_tokens <= 0 or self.num_tokens <= self.max_tokens)

    @property
    def ok(self) -> bool:
        """Whether every condition holds."""
        return (
            self.is_set
            and self.device == "cuda"
            and not self.needs_grad
            and not self.mutates_input
            and not self.no_shared
        )

    def checks(self) -> tuple[Check, ...]:
        """Return every condition."""
        if self.wanted is not None:
            setting = "asked for" if self.wanted else "declined"
        elif self.is_set:
            setting = "inside a CUDA graph capture"
        elif self.capturing:
            setting = (
                f"{self.num_tokens} tokens, more than the {self.max_tokens} of "
                f"{env.DUAL_STREAM_MAX_TOKENS.name}; dual_stream=True has it anyway"
            )
        else:
            setting = "not inside a CUDA graph capture; dual_stream=True has it in eager too"
        reads = "read by both at once"
        if self.mutates_input:
            reads = "the runner overwrites it while the shared experts would read it"
        grad = "needed" if self.needs_grad else "not needed"
        return (
            Check("setting", self.is_set, setting),
            Check("device", self.device == "cuda", self.device),
            Check("shared experts", not self.no_shared, self.no_shared or "separate"),
            Check("input", not self.mutates_input, reads),
            Check("gradients", not self.needs_grad, grad),
        )


class BlockFacts(NamedTuple):
    """Everything that decides how one call runs. Equal calls share a plan, found by its hash.

    Attributes:
        shape: Sizes of the call.
        add_late: Whether the shared output has to be added after the reduction.
        topk_format: Of the router.
        support: Whether the runner can defer that format.
        experts_refusal: Why the experts cannot be asked to defer; empty when they can.
        requested: The caller's wish, by argument or context; None when there is none.
        enabled: ``SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE``.
        max_tokens: ``SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS``.
        stream: What decides about streams.
    """

    shape: BlockShape
    add_late: bool
    topk_format: TopKFormat
    support: Support
    experts_refusal: str
    requested: bool | None
    enabled: bool
    max_tokens: int
    stream: StreamFacts


@dataclass(frozen=True)
class BlockPlan:
    """How one call runs, and why each other way was refused.

    Attributes:
        num_tokens: T.
        dual_stream: Whether the shared experts run on the alternate stream.
        order: Order on the host and, without a second stream, on the device.
        deferred: Whether the rows wait for the shared experts and one kernel finishes both.
        deferral_checks: Every condition of deferral.
        stream_checks: Every condition of the second stream.
        memory: The memory model's choice; None where it was not asked.
    """

    num_tokens: int
    dual_stream: bool
    order: Order
    deferred: bool
    deferral_checks: tuple[Check, ...]
    stream_checks: tuple[Check, ...]
    memory: OrderChoice | None

    @property
    def refusals(self) -> tuple[str, ...]:
        """What stood against deferral and against the second stream."""
        return tuple(str(c) for c in (*self.deferral_checks, *self.stream_checks) if not c.ok)

    def __str__(self) -> str:
        path = "forward_normal_dual_stream" if self.dual_stream else "forward_normal"
        finish = "one fused finalize" if self.deferred else "the runner finishes its own output"
        lines = [f"{path}, {self.num_tokens} tokens: {self.order}; {finish}"]
        if self.memory is not None:
            lines.append(f"  memory: {self.memory}")
        for title, checks in (
            ("deferred finalize", self.deferral_checks),
            ("second stream", self.stream_checks),
        ):
            lines.append(f"  {title}:")
            lines += [f"    {check}" for check in checks]
        return "\n".join(lines)


@dataclass(frozen=True)
class BlockExplanation:
    """How the last call ran, which runner serves the experts, and how a known router ran."""

    plan: BlockPlan | None
    experts: str
    router: str = ""

    def __str__(self) -> str:
        plan = "not called yet" if self.plan is None else str(self.plan)
        return "\n".join(part for part in (plan, self.router, self.experts) if part)


def _deferral_checks(facts: BlockFacts) -> tuple[Check, ...]:
    num_tokens, cap = facts.shape.num_tokens, facts.max_tokens
    asked = {None: "left to the block", True: "asked for", False: "declined by the caller"}
    return (
        Check("request", facts.requested is not False, asked[facts.requested]),
        Check(
            "switch",
            facts.enabled,
            "on" if facts.enabled else f"{env.ENABLE_DEFERRED_FINALIZE.name} is off",
        ),
        Check("tokens", num_tokens > 0, f"{num_tokens}"),
        Check("shared experts", not facts.stream.no_shared, facts.stream.no_shared or "separate"),
        Check(
            "placement",
            not facts.add_late,
            "replicated over the group, so added once, after the reduction"
            if facts.add_late
            else "added by this rank before any reduction",
        ),
        Check("format and quantization", facts.support.ok, facts.support.why or "can defer"),
        Check("top_k", 1 <= facts.shape.top_k <= 64, f"{facts.shape.top_k}, of 1 to 64"),
        Check(
            "cap",
            cap <= 0 or num_tokens <= cap,
            f"{num_tokens} tokens, {env.DEFERRED_FINALIZE_MAX_TOKENS.name} is "
            + (f"{cap}" if cap > 0 else "off"),
        ),
        Check("experts", not facts.experts_refusal, facts.experts_refusal or "asked directly"),
    )


@functools.lru_cache(maxsize=1024)
def make_plan(facts: BlockFacts) -> BlockPlan:
    """Return how a call with these facts runs.

    With a second stream both are in memory at once whatever the order, and with gradients both keep
    what they made, so the memory model is not asked there. One order with gradients also adds them
    up in one order, as traced code does.
    """
    checks, stream = _deferral_checks(facts), facts.stream
    may_defer = all(check.ok for check in checks)
    memory, deferred = None, may_defer
    order = Order.SHARED_FIRST if stream.mutates_input else Order.ROUTED_FIRST
    matters = not (stream.ok or stream.needs_grad or stream.no_shared)
    if matters and facts.shape.num_tokens > 0:
        memory = choose_order(
            facts.shape,
            mutates_input=stream.mutates_input,
            may_defer=may_defer,
            must_defer=may_defer and facts.requested is True,
        )
        order, deferred = memory.order, memory.deferred
    num_tokens = facts.shape.num_tokens
    return BlockPlan(num_tokens, stream.ok, order, deferred, checks, stream.checks(), memory)
