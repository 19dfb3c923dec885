# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routing traces: which experts a model chose, recorded from its layers.

    with record_routing(model, model_name="my model") as recorder:
        model(batch)
    recorder.trace().save(Path("trace.npz"))
    trace = load_trace(Path("trace.npz"))

``ep/trace_file.py`` documents the file. ``python -m sgl_moe_jit bench ep --simulate --trace FILE``
plans with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.ep.trace_file import RoutingTrace, load_trace
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.block_facts import checked_topk
from sgl_moe_jit.moe.input_checks import check_module
from sgl_moe_jit.moe.layer_base import MoELayer
from sgl_moe_jit.moe.router import Router
from sgl_moe_jit.moe.runners.base import as_standard
from sgl_moe_jit.moe.topk import TopKOutput

__all__ = ["RoutingTrace", "TraceRecorder", "load_trace", "record_routing"]


@dataclass
class TraceRecorder:
    """What :func:`record_routing` has seen so far.

    Attributes:
        model_name: For the trace.
        num_experts: E.
        calls: (layer, [T, K] int32 ids on their device) of each call.
    """

    model_name: str
    num_experts: int
    calls: list[tuple[str, Tensor]] = field(default_factory=list)

    def add(self, layer: str, topk_output: TopKOutput) -> None:
        """Keep a copy of a call's ids, on their device: nothing waits for it.

        Raises:
            RuntimeError: inside a CUDA graph capture or traced code, where there are no values yet.
        """
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or capturing:
            raise RuntimeError(
                "record_routing: expected an eager run, got a CUDA graph capture or traced code; "
                "record without graphs and torch.compile"
            )
        ids = as_standard(topk_output).topk_ids.detach()
        outside = (ids < 0) | (ids >= self.num_experts)
        self.calls.append((layer, ids.masked_fill(outside, -1).to(torch.int32)))

    def trace(self) -> RoutingTrace:
        """Return the calls so far; waits for the device.

        Raises:
            ValueError: there were none, or they differ in K.
        """
        if not self.calls:
            raise ValueError(
                "record_routing: expected at least one call of a recorded layer, got none; "
                "replayed CUDA graphs and compiled code do not pass here"
            )
        widths = {ids.shape[1] for _, ids in self.calls}
        if len(widths) > 1:
            raise ValueError(f"record_routing: expected one top_k, got {sorted(widths)}")
        calls = tuple((layer, ids.cpu().numpy()) for layer, ids in self.calls)
        return RoutingTrace(self.model_name, self.num_experts, widths.pop(), calls)


@contextmanager
def record_routing(
    model: torch.nn.Module, *, model_name: str, num_experts: int | None = None
) -> Iterator[TraceRecorder]:
    """Record the experts that every MoE layer of a model chooses while the context is open.

    Of a ``SharedExpertMoEBlock`` whose gate is a module, the gate's choice, which stands before any
    dispatch; of other ``FusedMoE`` and ``PreparedMoE`` layers, the choice that they are called
    with. Ids number the layer's routed experts; those outside 0 to E - 1 become -1. Under expert
    parallelism each rank records its own tokens.

    Hooks are there only while the context is open, so nothing costs anything before or after. They
    change no result, and deferral stays as it was. A call costs one copy of its ids.

    Args:
        model: Holds the layers, or is one.
        model_name: For the trace.
        num_experts: E. None: what a ``Router`` of a block says, or else what the layer holds.

    Yields:
        The recorder; ask it for ``trace()`` inside the context or after it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: there is no layer, layers differ in E, or one holds a slice, or shared experts
            beside routed ones, and neither a ``Router`` nor ``num_experts`` says E.
    """
    check_module("model", model)
    named = {
        id(block.experts): (name or type(block).__name__, block)
        for name, block in model.named_modules()
        if isinstance(block, SharedExpertMoEBlock)
    }
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    if not layers:
        raise ValueError(
            "model: expected a FusedMoE or PreparedMoE in it, got none; "
            "load_block and load_experts of sgl_moe_jit.integrations.transformers make them"
        )
    if num_experts is None:
        num_experts = _experts_of(layers, {key: block for key, (_, block) in named.items()})
    recorder = TraceRecorder(model_name, num_experts)
    handles = []
    try:
        for name, layer in layers.items():
            block_name, block = named.get(id(layer), ("", None))
            if block is not None and isinstance(block.gate, torch.nn.Module):
                hook = _gate_hook(recorder, block_name, block)
                handles.append(block.gate.register_forward_hook(hook))
            else:
                hook = _layer_hook(recorder, name or type(layer).__name__)
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _experts_of(layers: dict[str, MoELayer], blocks: dict[int, SharedExpertMoEBlock]) -> int:
    counts = set()
    for name, layer in layers.items():
        block = blocks.get(id(layer))
        if block is not None and isinstance(block.gate, Router):
            counts.add(block.gate.config.num_experts)
        elif layer.expert_range is not None or (block is not None and block.shared_is_fused):
            raise ValueError(
                f"num_experts: expected the number of routed experts, since {name or 'model'} "
                "holds a slice of them, or shared experts among them, got None"
            )
        else:
            counts.add(layer.num_local_experts)
    if len(counts) > 1:
        raise ValueError(f"model: expected layers with one number of experts, got {sorted(counts)}")
    return counts.pop()


def _gate_hook(
    recorder: TraceRecorder, name: str, block: SharedExpertMoEBlock
) -> Callable[..., None]:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        read = block.read_gate
        recorder.add(name, checked_topk(output if read is None else read(output)))

    return hook


def _layer_hook(recorder: TraceRecorder, name: str) -> Callable[..., None]:
    def hook(_module: Any, args: Any, kwargs: Any) -> None:
        recorder.add(name, kwargs["topk_output"] if "topk_output" in kwargs else args[1])

    return hook
