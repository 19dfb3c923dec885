# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``SharedExpertMoEBlock``: router, routed experts and shared experts, finished in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.moe import block_deepep
from sgl_moe_jit.moe import block_facts as find
from sgl_moe_jit.moe.block_facts import Call
from sgl_moe_jit.moe.block_finish import SharedOutput, finish
from sgl_moe_jit.moe.block_gates import (
    BlockExplanation,
    BlockFacts,
    BlockPlan,
    StreamFacts,
    make_plan,
)
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, requested_defer
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from sgl_moe_jit.moe.expert_slice import ReduceGroups
from sgl_moe_jit.moe.input_checks import check_callable, rows_of
from sgl_moe_jit.moe.layer_base import MoELayer
from sgl_moe_jit.moe.router import moving_only
from sgl_moe_jit.moe.shared_order import Order
from sgl_moe_jit.moe.streams import Fork
from sgl_moe_jit.moe.topk import TopKOutput

if TYPE_CHECKING:
    from typing_extensions import Self


class SharedExpertMoEBlock(torch.nn.Module):
    """An MoE block with shared experts, as in DeepSeek-V2/V3, Kimi-K2, GLM-4 and Qwen2-MoE.

    ``y = routed(x) + shared(x)``, or with a gate ``y = routed(x) + sigmoid(gate(x)) * shared(x)``.
    Where nothing stands against it, the experts hand over their rows un-finalized and one kernel
    sums them and adds the shared output. :meth:`explain` says how the last call ran, and why not in
    another way.

    All parts are called as modules, with the hidden states as [T, H]: hooks fire, adapters work.
    A float32 ``e_score_correction_bias`` of the gate stays so through ``.to(dtype)``, ``.half()``.
    A runner that declares ``mutates_input`` overwrites the block's input too.

    Args:
        gate: From [T, H] to a router's output: a ``Router``, another module, or a function.
        experts: A ``FusedMoE`` or ``PreparedMoE``; anything else that maps ([T, H], router output)
            to [T, H] works too, but cannot defer. With ``reduce_results`` off: the block reduces.
        shared_experts: From [T, H] to [T, H], or None.
        shared_expert_gate: From [T, H] to [T, 1] logits, or None. It sees the block's own input.
        read_gate: Turns what ``gate`` returns into a router's output; None: it is one. A
            ``block_facts.DirectGate`` may also route in the gate's place.
        shared_is_replicated: Whether every rank of the experts' groups holds the whole shared
            experts. False: each holds a slice, and their outputs sum up.
        shared_is_fused: Whether the shared experts are among the routed ones, as extra slots. Then
            ``shared_experts`` is never called.
        reduce_results: Whether to sum the result over the experts' groups. A caller that does so
            itself leaves it off: replicated shared experts then run on the first rank alone.
        dual_stream: Whether :meth:`forward` gives the shared experts a stream of their own. None:
            inside a CUDA graph capture, up to ``SGL_MOE_JIT_DUAL_STREAM_MAX_TOKENS`` tokens.
        shared_width: For the memory model: elements a token that the shared experts hold at once.
            None: read off their matrices.

    Raises:
        TypeError: a part is neither a module nor a function.
        ValueError: arguments contradict each other.
    """

    _flattens = True  # router and shared experts get [T, H]
    _routed_by: str | None = None  # how a DirectGate's last call ran

    def __init__(
        self,
        gate: Callable[[Tensor], Any],
        experts: Callable[..., Any],
        shared_experts: Callable[[Tensor], Tensor] | None = None,
        shared_expert_gate: Callable[[Tensor], Tensor] | None = None,
        *,
        read_gate: Callable[[Any], TopKOutput] | None = None,
        shared_is_replicated: bool = False,
        shared_is_fused: bool = False,
        reduce_results: bool = False,
        dual_stream: bool | None = None,
        shared_width: int | None = None,
    ) -> None:
        super().__init__()
        check_callable("gate", gate)
        find.check_parts(experts, shared_experts, shared_expert_gate, shared_is_fused)
        self.groups: ReduceGroups = getattr(experts, "groups", None) or ReduceGroups(None, None)
        if reduce_results and not self.groups.given:
            raise ValueError("reduce_results: expected experts with a tp_group or an ep_group")
        self.gate, self.experts = gate, experts
        self.shared_experts, self.shared_expert_gate = shared_experts, shared_expert_gate
        self.read_gate = read_gate
        self.shared_is_replicated, self.shared_is_fused = shared_is_replicated, shared_is_fused
        self.reduce_results, self.dual_stream = reduce_results, dual_stream
        self.shared_width = shared_width
        self._known_width = (0, 0)  # (id of the shared experts, their width)
        self.last_plan: BlockPlan | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let conversions move a float32 correction bias of any gate, and not cast it."""
        fn = moving_only(fn, find.correction_biases(self.gate))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def forward(self, hidden_states: Tensor, *, defer: bool | None = None) -> Tensor:
        """Run the block, on one stream or two.

        Args:
            hidden_states: [..., H].
            defer: False: the runner finishes its own output. True: defer wherever possible, at any
                cost in memory. None: as the innermost ``deferred_finalize_context`` asks, if there
                is one and the code is not traced; else as the gates and the memory model say.

        Returns:
            Like ``hidden_states``; with a group and without ``reduce_results`` this rank's part.

        Raises:
            TypeError: ``gate`` does not return a router's output, or the input is no tensor.
            TypeError, ValueError, RuntimeError, UnsupportedError: see :meth:`MoELayer.forward`.
        """
        return self._run(hidden_states, defer, self.dual_stream)

    def forward_normal(self, hidden_states: Tensor, *, defer: bool | None = None) -> Tensor:
        """Run on the current stream; arguments as in :meth:`forward`.

        The shared experts run first when the runner overwrites its input; else in the order that
        the memory model prefers, as a rule last: routed workspace and shared activations are then
        never alive together. Both orders give the same bits.
        """
        return self._run(hidden_states, defer, False)

    def forward_normal_dual_stream(
        self, hidden_states: Tensor, *, defer: bool | None = None
    ) -> Tensor:
        """Run the shared experts on the alternate stream; arguments as in :meth:`forward`.

        Router and routed experts stay on the current stream and are issued first, so that the
        finalize follows the experts' last kernel there. Where a second stream is refused (see
        :meth:`explain`) this is :meth:`forward_normal`.
        """
        return self._run(hidden_states, defer, True)

    def forward_deepep(
        self,
        hidden_states: Tensor,
        path: ExpertParallelPath,
        *,
        num_token_non_padded: Tensor | int | None = None,
    ) -> Tensor:
        """Run with each token's experts on any rank: a collective, also without tokens.

        With ``shared_is_fused`` the module of the shared experts is never called: they are slots
        among the experts. Else it runs here, whole, on this rank's tokens.

        Args:
            hidden_states: [..., H], this rank's tokens, as many as it has.
            path: Dispatcher, expander, and the load balancer's table and recorder.
            num_token_non_padded: Rows from here on are padding: an int, or one on the device.

        Returns:
            Like ``hidden_states``: these tokens' whole output, which is not to be reduced.

        Raises:
            RuntimeError: a gradient is wanted. Others: see ``block_deepep`` and the dispatcher.
        """
        return block_deepep.run(self, hidden_states, path, num_token_non_padded)

    def explain(self) -> BlockExplanation:
        """Return how the last call outside traced code ran, and the experts' runner."""
        return BlockExplanation(self.last_plan, self._explain_experts(), self._routed_by or "")

    def _explain_experts(self) -> str:
        return str(self.experts.explain()) if isinstance(self.experts, MoELayer) else ""

    def _experts_facts(self) -> find.ExpertsFacts:
        return find.ExpertsFacts.of(self.experts)

    def _run(self, hidden_states: Tensor, defer: bool | None, dual_stream: bool | None) -> Tensor:
        experts = self._experts_facts()
        x = find.adjacent_columns(rows_of(hidden_states, experts.hidden_dim))
        no_shared = self._no_shared(x)
        stream = None
        if not torch.compiler.is_compiling() and type(x.shape[0]) is int:  # not symbolic, in fx
            capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
            stream = StreamFacts(
                wanted=dual_stream,
                device=x.device.type,
                capturing=capturing,
                needs_grad=find.needs_grad(self, x),
                mutates_input=experts.mutates_input,
                no_shared=no_shared,
                num_tokens=x.shape[0],
                max_tokens=env.DUAL_STREAM_MAX_TOKENS.get(),
            )
        outer = x if self._flattens else hidden_states
        call = Call(x, outer, no_shared, experts, defer, stream)
        y = self._on_two_streams(call) if stream is not None and stream.ok else self._on_one(call)
        return y.reshape(hidden_states.shape)

    def _on_one(self, call: Call) -> Tensor:
        shared = None
        if call.experts.mutates_input and not call.no_shared:
            shared = self._shared(call.outer)
        topk_output = self._route(call.outer)
        order, deferred = self._decide(call, topk_output)
        if shared is None and not call.no_shared and order is Order.SHARED_FIRST:
            shared = self._shared(call.outer)
        routed = self._routed(call, topk_output, deferred)
        if shared is None and not call.no_shared:
            shared = self._shared(call.outer)
        return self._finish(routed, shared, call.x)

    def _on_two_streams(self, call: Call) -> Tensor:
        x = call.x
        with Fork(x.device, call.outer) as fork:
            topk_output = self._route(call.outer)
            _, deferred = self._decide(call, topk_output)
            routed = self._routed(call, topk_output, deferred)
            with fork.alternate():
                shared = self._shared(call.outer)
        fork.hand_over(shared.output, shared.logits)
        return self._finish(routed, shared, x)

    def _no_shared(self, x: Tensor) -> str:
        """Return why no shared experts run in this call; empty when they do."""
        if self.shared_is_fused:
            return "fused into the routed experts"
        if self.shared_experts is None:
            return "none"
        # With gradients they do run: a rank without tokens owes zeros, not none.
        if x.shape[0] == 0 and not find.needs_grad(self, x):
            return "no tokens"
        if self.shared_is_replicated and not self.reduce_results and not self.groups.is_first_rank:
            return "replicated, and added on the first rank of the group"
        return ""

    @property
    def _adds_late(self) -> bool:
        return self.shared_is_replicated and self.reduce_results and self.groups.size > 1

    def _shared(self, x: Tensor) -> SharedOutput:
        assert self.shared_experts is not None  # asked for in _no_shared
        output = self.shared_experts(x)
        gate = self.shared_expert_gate
        return SharedOutput(output, None if gate is None else gate(x))

    def _route(self, x: Tensor) -> TopKOutput:
        return find.route(self, x)

    def _routed(
        self, call: Call, topk_output: TopKOutput, deferred: bool
    ) -> Tensor | DeferredFinalizeOutput:
        if call.experts.runner is None:
            return find.call_as_is(self.experts, call, topk_output)
        ask = {"defer": True} if deferred else {}
        return self.experts(call.x, topk_output, **ask)  # type: ignore[no-any-return]

    def _finish(
        self, routed: Tensor | DeferredFinalizeOutput, shared: SharedOutput | None, x: Tensor
    ) -> Tensor:
        groups = self.groups if self.reduce_results else None
        return finish(routed, shared, x, reduce_over=groups, add_late=self._adds_late)

    def _width(self, x: Tensor) -> int:
        if self.shared_width is not None:
            return self.shared_width
        shared = self.shared_experts
        if self._known_width[0] != id(shared):
            self._known_width = id(shared), find.shared_width(shared, x.shape[1])
        return self._known_width[1]

    def _decide(self, call: Call, topk_output: TopKOutput) -> tuple[Order, bool]:
        """Return the order, and whether to ask for un-finalized rows."""
        experts = call.experts
        support, refusal = experts.support(topk_output.format), experts.refusal
        if call.stream is None:  # traced: a plan's texts would turn sizes into constants
            order = Order.SHARED_FIRST if experts.mutates_input else Order.ROUTED_FIRST
            possible = support.ok and not refusal and not call.no_shared and not self._adds_late
            return order, possible and call.defer is not False
        facts = BlockFacts(
            shape=find.shape_of(experts, call.x, find.top_k_of(topk_output), self._width(call.x)),
            add_late=self._adds_late,
            topk_format=topk_output.format,
            support=support,
            experts_refusal=refusal,
            requested=requested_defer() if call.defer is None else call.defer,
            enabled=env.ENABLE_DEFERRED_FINALIZE.get(),
            max_tokens=env.DEFERRED_FINALIZE_MAX_TOKENS.get(),
            stream=call.stream,
        )
        self.last_plan = plan = make_plan(facts)
        return plan.order, plan.deferred
