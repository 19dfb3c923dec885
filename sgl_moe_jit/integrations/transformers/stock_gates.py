# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""transformers' own routers, known by what their forward computes, through one kernel on CUDA.

Their logits are computed as their forward does; from there on the routing kernel takes the place of
a dozen torch operations. What is not known, or looked at by somebody, is called as a module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers.gate_table import style_of_gate
from sgl_moe_jit.moe.autocast import is_autocast_on
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops import route_topk
from sgl_moe_jit.ops.library import can_bypass_dispatcher

_hooks = torch.nn.modules.module
_own_call = torch.nn.Module.__call__


def looked_at(gate: torch.nn.Module) -> str:
    """Return who sees a router's call, or stands around it; empty when nobody does."""
    own = gate.__dict__
    if "forward" in own:
        return "its forward is replaced on the instance"
    if type(gate).__call__ is not _own_call:
        return "its class has a call of its own"
    if own.get("_compiled_call_impl") is not None:
        return "it is compiled by itself"
    if (
        gate._forward_hooks
        or gate._forward_pre_hooks
        or gate._backward_hooks
        or gate._backward_pre_hooks
        or _hooks._global_forward_hooks
        or _hooks._global_forward_pre_hooks
        or _hooks._global_backward_hooks
        or _hooks._global_backward_pre_hooks
    ):
        return "a hook on it"
    return ""


def route(gate: Any, x: Tensor) -> tuple[StandardTopKOutput | None, str]:
    """Route through the kernel, or say why the router has to be called as a module.

    Ids are the stock router's as a set, int32 and best first; of equal choice values, among which
    the stock router takes any, the lower ids. Weights are the stock router's but for the order of
    two sums (a softmax's, a renormalisation's). A choice value of NaN comes last, where the stock
    router takes it first: with NaN in one expert's gate row or bias, other experts are chosen.

    Args:
        gate: A block's router.
        x: What the stock block calls it with: [..., H].

    Returns:
        The output and an empty text, or None and why not.
    """
    if not route_topk.is_cuda(x):
        return None, f"on {x.device.type}"
    cls: Any = type(gate)
    try:  # by its forward too, which somebody may have replaced on the class
        style = style_of_gate(cls, cls.forward) if isinstance(gate, torch.nn.Module) else None
    except UnsupportedError as error:
        return None, str(error)
    if style is None:
        return None, "not a router known here"
    reason = looked_at(gate)
    if reason:
        return None, reason
    weight, bias = gate.weight, style.bias(gate)
    if not can_bypass_dispatcher(x, weight, bias):
        return None, "gradients, tracing, or tensors that are not plain"
    if is_autocast_on("cuda"):
        return None, "autocast is on"
    experts = weight.shape[0]
    if style.has_bias and (bias is None or bias.shape != (experts,)):
        return None, "its bias is not one number an expert"
    if bias is not None and bias.dtype in (torch.bfloat16, torch.float16):
        bias = bias.float()  # as in the stock forward's sum with float32 scores
    try:
        options = style.routing(gate, experts).kernel_options
    except (TypeError, ValueError) as error:
        return None, str(error)
    if experts != getattr(gate, "num_experts", experts) or x.shape[-1] != gate.hidden_dim:
        return None, "sizes that contradict each other"
    # The hidden states stand for their logits: the same rows on the same device, plain as well.
    flat = x.reshape(-1, gate.hidden_dim)
    reason = route_topk.refusal(flat, options, bias, weights_dtype=weight.dtype)
    if reason:
        return None, reason
    logits = style.logits(gate, x)
    dtype = torch.float32 if style.in_float32 else logits.dtype
    weights, ids = route_topk.route_topk(logits, options, bias, weights_dtype=dtype)
    return StandardTopKOutput(weights, ids, num_experts=experts), ""


class ReadGate:
    """``read_gate`` of a ``SharedExpertMoEBlock`` with one of transformers' routers as its gate.

    Routers known here go through the kernel on CUDA where nobody looks at their call.
    """

    def __call__(self, output: tuple[Tensor, Tensor, Tensor]) -> StandardTopKOutput:
        """Turn what a transformers router returns into a router's output.

        Args:
            output: Logits [T, E], weights [T, K], which hold the model's factor already, and ids
                [T, K], as the gates of the blocks that ``load_block`` knows return them.
        """
        logits, weights, ids = output
        return StandardTopKOutput(weights, ids, num_experts=logits.shape[-1])

    def route(self, gate: Any, x: Tensor) -> tuple[StandardTopKOutput | None, str]:
        """Return the kernel's output, or None, and a line about how the router ran."""
        topk_output, reason = route(gate, x)
        how = f"called as a module, {reason}" if reason else "one kernel after its logits"
        return topk_output, f"router: {type(gate).__name__}: {how}"


read_gate = ReadGate()
