# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's MoE layers in bfloat16, stock and fused, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.bench.demo_model import moe_layers, prompts
from sgl_moe_jit.integrations.transformers import fuse_shared_experts, unfuse_shared_experts


@dataclass(frozen=True)
class ErrorSize:
    """How large the errors of one layer's output are.

    Attributes:
        rms: Root mean square.
        p999: The size that 99.9 % of them stay below.
        largest: One element of a hundred thousand: whose is larger is partly luck, since the GEMMs'
            own rounding, which both layers share, decides it.
    """

    rms: float
    p999: float
    largest: float

    @classmethod
    def of(cls, errors: Tensor) -> ErrorSize:
        """Summarise a tensor of errors."""
        sizes = errors.abs().flatten()
        p999 = sizes.kthvalue(max(1, int(sizes.numel() * 0.999))).values
        return cls(float(sizes.square().mean().sqrt()), float(p999), float(sizes.max()))


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one bfloat16 MoE layer against float64.

    Attributes:
        layer: The block's name.
        output_rms: Root mean square of the float64 output.
        stock: Of the model's own block.
        fused: Of the fused block.
    """

    layer: str
    output_rms: float
    stock: ErrorSize
    fused: ErrorSize


@dataclass
class _Seen:
    """What one stock block received, chose and returned."""

    hidden_states: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None
    output: Tensor | None = None


def _run_stock(model: Any) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    handles = []
    for name, block in moe_layers(model):
        record = seen[name] = _Seen()

        def on_block(_m: Any, args: Any, output: Tensor, record: _Seen = record) -> None:
            record.hidden_states, record.output = args[0], output

        def on_experts(_m: Any, args: Any, record: _Seen = record) -> None:
            record.topk_ids, record.topk_weights = args[1], args[2]

        handles.append(block.register_forward_hook(on_block))
        handles.append(block.experts.register_forward_pre_hook(on_experts))
    try:
        model(prompts().to(model.device))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def layer_float64(block: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a block in float64 from its weights and a given routing: [T, H].

    Args:
        block: The MoE block.
        hidden_states: [T, H], its input.
        ids: [T, K] chosen experts.
        weights: [T, K] their weights, scaling factor included.
    """
    x = hidden_states.double()
    shared = block.shared_experts
    projections = (shared.gate_proj, shared.up_proj, shared.down_proj)
    total = _swiglu(x, *(p.weight.double() for p in projections))
    for expert in range(block.experts.gate_up_proj.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = block.experts.gate_up_proj[expert].double().chunk(2)
        rows = _swiglu(x[token], gate, up, block.experts.down_proj[expert].double())
        total = total.index_add(0, token, rows * weights[token, slot, None].double())
    return total


@torch.no_grad()
def compare_bfloat16(model: Any) -> list[LayerErrors]:
    """Compare each MoE block of a bfloat16 model, on the inputs it gets there, with float64."""
    seen = _run_stock(model)
    fuse_shared_experts(model)
    results = []
    try:
        for name, block in moe_layers(model):
            record = seen[name]
            x, stock = record.hidden_states, record.output
            assert x is not None and stock is not None, name
            assert record.topk_ids is not None and record.topk_weights is not None, name
            width = x.shape[-1]
            exact = layer_float64(block, x.view(-1, width), record.topk_ids, record.topk_weights)
            results.append(
                LayerErrors(
                    name,
                    float(exact.square().mean().sqrt()),
                    ErrorSize.of(stock.view(-1, width).double() - exact),
                    ErrorSize.of(block(x).view(-1, width).double() - exact),
                )
            )
    finally:
        unfuse_shared_experts(model)
    return results
