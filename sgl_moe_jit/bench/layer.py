# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench layer``: a whole MoE layer, deferred or not, beside transformers' and the GEMMs alone.

Router, routed experts, shared experts and their sum, in CUDA graphs. The weights are far larger
than the L2 cache, so they are cold in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.layer_cases import batches, oracle
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runners import all_experts
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops.activation import silu_and_mul
from sgl_moe_jit.ops.grouped_mm import grouped_mm
from sgl_moe_jit.ops.permute import moe_permute

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
GEMMS = "GEMMs alone"
STOCK = "transformers"
CAPTURES = 5
"""Graphs of each provider; see ``Contest.on_cuda``."""
_CHECKED_TOKENS = 4
# Roundings to bfloat16 along the way, each of random sign over thousands of terms, stay well below
# this share of a row's norm; a wrong expert or weight does not.
_ALLOWED = 2.0**-6
# Provider -> streams and whether the rows are handed over un-finalized; the first as the block
# decides.
OURS: dict[str, Callable[[SharedExpertMoEBlock, Tensor], Tensor]] = {
    "sgl_moe_jit": lambda block, x: block(x),
    "sgl_moe_jit, two streams": lambda block, x: block.forward_normal_dual_stream(x),
    "sgl_moe_jit, two streams, not deferred": lambda block, x: block.forward_normal_dual_stream(
        x, defer=False
    ),
    "sgl_moe_jit, one stream": lambda block, x: block.forward_normal(x),
    "sgl_moe_jit, one stream, not deferred": lambda block, x: block.forward_normal(x, defer=False),
}


def topk_of(block: SharedExpertMoEBlock, x: Tensor) -> StandardTopKOutput:
    """Return what the block's router says of these tokens."""
    output: Any = block.gate(x)
    return block.read_gate(output) if block.read_gate is not None else output  # type: ignore[return-value]


def checked(name: str, call: Callable[[], Tensor], want: Tensor) -> Contestant:
    """Return the contestant whose first rows must be those of the oracle."""

    def check() -> None:
        error = call().reshape(-1, want.shape[-1])[: want.shape[0]].double() - want
        share = float((error.norm(dim=-1) / want.norm(dim=-1)).max())
        if not share <= _ALLOWED:
            raise WrongResultError(
                f"{name}: a row is off by {share:.3g} of its norm, allowed {_ALLOWED:.3g}"
            )

    return Contestant([call], check)


def _expert_gemms(
    weights: ExpertWeights, x: Tensor, topk: StandardTopKOutput
) -> Callable[[], Tensor]:
    """Return the routed experts' two products as the runner makes them, on rows that are ready."""
    up, down = weights.up_as_input_major(), weights.down_as_input_major()
    num_experts = weights.num_experts
    if all_experts.serves(weights, x, topk):
        every = x.expand(num_experts, -1, -1)
        between = silu_and_mul(torch.bmm(every, up).flatten(0, 1)).view(num_experts, len(x), -1)

        def batched() -> Tensor:
            torch.bmm(every, up)
            return torch.bmm(between, down)

        return batched
    rows, _, ends = moe_permute(x, topk.topk_ids.int(), num_experts)
    hidden = silu_and_mul(grouped_mm(rows, up, ends))

    def grouped() -> Tensor:
        grouped_mm(rows, up, ends)
        return grouped_mm(hidden, down, ends)

    return grouped


def _gemms(stock: Any, block: SharedExpertMoEBlock, x: Tensor) -> Contestant:
    """Return the layer's matrix products on inputs that are ready: what the block cannot avoid.

    The router's, in the dtype its model computes it in; the routed experts' two; the shared
    experts' three.
    """
    from sgl_moe_jit.integrations.transformers.experts import expert_weights

    experts = _expert_gemms(expert_weights(stock.experts), x, topk_of(block, x))
    in_float32 = hasattr(stock.gate, "e_score_correction_bias")
    routed = x.float() if in_float32 else x
    router = stock.gate.weight.float() if in_float32 else stock.gate.weight
    shared = getattr(stock, "shared_experts", None)
    between = None if shared is None else shared.gate_proj(x)

    def call() -> Tensor:
        torch.nn.functional.linear(routed, router)
        out = experts()
        if shared is not None:
            shared.gate_proj(x)
            shared.up_proj(x)
            shared.down_proj(between)
        return out

    def check() -> None:  # their values are the layer's, which is checked
        if not call().isfinite().all():
            raise WrongResultError(f"{GEMMS}: a value is not finite")

    return Contestant([call], check)


def wanted(stock: torch.nn.Module, block: SharedExpertMoEBlock, x: Tensor) -> Tensor:
    """Return the oracle's output for the tokens that are compared."""
    return oracle(stock, x[:_CHECKED_TOKENS], lambda rows: topk_of(block, rows))


def contestants(
    stock: torch.nn.Module, block: SharedExpertMoEBlock, x: Tensor
) -> dict[str, Callable[[], Contestant]]:
    """Return what makes each contestant, by name, ours first."""
    want = wanted(stock, block, x)
    calls: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(call, block, x) for name, call in OURS.items()
    }
    calls[STOCK] = functools.partial(stock, x.unsqueeze(0))
    made: dict[str, Callable[[], Contestant]] = {
        name: functools.partial(checked, name, call, want) for name, call in calls.items()
    }
    return {**made, GEMMS: functools.partial(_gemms, stock, block, x)}


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one layer after another: bfloat16, one rank's experts."""
    for batch in batches(options.cases, options.tokens or TOKENS):
        case, note, num_tokens = batch.case, batch.layer.describe(), len(batch.x)
        with torch.no_grad():
            chosen = options.choose(contestants(batch.stock, batch.block, batch.x))
            shape = f"{case.name}, {num_tokens} tokens"
            outcomes = contest.on_cuda(shape, chosen, captures=CAPTURES)
        del chosen, batch
        yield [
            Record.of("layer", case, num_tokens, "graph", name, outcome, 0, note=note)
            for name, outcome in outcomes.items()
        ]
