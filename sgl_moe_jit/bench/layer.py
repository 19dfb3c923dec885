# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench layer``: routed experts and the shared add, deferred or not, beside the GEMMs alone.

One rank's share of a layer: some local experts, every token routed to top_k of them, a shared
output that is given. The weights are far larger than the L2 cache, so they are cold in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.moe.deferred import finalize_output
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runners import MoERunner, create_runner
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops.activation import silu_and_mul
from sgl_moe_jit.ops.grouped_mm import grouped_mm
from sgl_moe_jit.ops.permute import moe_permute

TOKENS = (1, 8, 16, 64, 256, 1024, 4096)
GEMMS = "GEMMs alone"
LOCAL_EXPERTS = 32
INTERMEDIATE = 2048  # DeepSeek-V3's expert width
_CHECKED_TOKENS = 4
# Three roundings to bfloat16 along the way, each of random sign over thousands of terms, stay well
# below this share of a row's norm; a wrong expert or weight does not.
_ALLOWED = 2.0**-6


@dataclass(frozen=True)
class LayerInputs:
    """One layer and one batch; ``x`` and ``shared`` are [T, H] bfloat16."""

    weights: ExpertWeights
    runner: MoERunner
    x: Tensor
    topk: StandardTopKOutput
    shared: Tensor


def swiglu(x: Tensor) -> Tensor:
    """Return ``silu(first half) * second half``."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def make_weights(
    case: FinalizeCase, device: torch.device | str, num_experts: int, intermediate_dim: int
) -> ExpertWeights:
    """Return random experts of a case's width, scaled so that outputs are of size one."""
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.empty(num_experts, *shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, shape[-1] ** -0.5, generator=generator)

    return ExpertWeights(
        up=draw(2 * intermediate_dim, case.hidden_dim),
        down=draw(case.hidden_dim, intermediate_dim),
        activation=swiglu,
        is_silu_and_mul=True,
    )


def make_inputs(weights: ExpertWeights, num_tokens: int, top_k: int) -> LayerInputs:
    """Return a batch: distinct experts at random, weights that sum to one."""
    device, hidden = weights.down.device, weights.down.shape[1]
    generator = torch.Generator(device=device).manual_seed(1)
    scores = torch.rand(num_tokens, weights.num_experts, generator=generator, device=device)
    values, ids = scores.topk(top_k)
    rows = torch.empty(2, num_tokens, hidden, dtype=torch.bfloat16, device=device)
    x, shared = rows.normal_(generator=generator)
    topk = StandardTopKOutput(values / values.sum(-1, keepdim=True), ids.int())
    return LayerInputs(weights, create_runner("grouped_mm", weights), x, topk, shared)


def oracle(inputs: LayerInputs, num_tokens: int) -> Tensor:
    """Return the layer's output for the first tokens in float64, expert by expert."""
    weights, topk = inputs.weights, inputs.topk
    total = inputs.shared[:num_tokens].double()
    for token in range(total.shape[0]):
        row = inputs.x[token].double()
        for expert, scale in zip(topk.topk_ids[token], topk.topk_weights[token], strict=True):
            gate, up = (weights.up[expert].double() @ row).chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            total[token] += scale.double() * (weights.down[expert].double() @ hidden)
    return total


def _layer(name: str, inputs: LayerInputs, want: Tensor, defer: bool) -> Contestant:
    def call() -> Tensor:
        return finalize_output(inputs.runner.run(inputs.x, inputs.topk, defer=defer), inputs.shared)

    def check() -> None:
        error = call()[: want.shape[0]].double() - want
        share = float((error.norm(dim=-1) / want.norm(dim=-1)).max())
        if not share <= _ALLOWED:
            raise WrongResultError(
                f"{name}: a row is off by {share:.3g} of its norm, allowed {_ALLOWED:.3g}"
            )

    return Contestant([call], check)


def _gemms(inputs: LayerInputs) -> Contestant:
    """Return the two grouped GEMMs on rows that are ready: what no runner can avoid."""
    weights = inputs.weights
    rows, _, ends = moe_permute(inputs.x, inputs.topk.topk_ids, weights.num_experts)
    up, down = weights.up_as_input_major(), weights.down_as_input_major()
    hidden = silu_and_mul(grouped_mm(rows, up, ends))

    def call() -> Tensor:
        grouped_mm(rows, up, ends)
        return grouped_mm(hidden, down, ends)

    def check() -> None:  # their values are the layer's, which is checked
        if not call().isfinite().all():
            raise WrongResultError(f"{GEMMS}: a value is not finite")

    return Contestant([call], check)


def contestants(inputs: LayerInputs) -> dict[str, Callable[[], Contestant]]:
    """Return what makes each contestant, by name, ours first."""
    want = oracle(inputs, _CHECKED_TOKENS)
    names = {"sgl_moe_jit": True, "sgl_moe_jit, not deferred": False}
    made: dict[str, Callable[[], Contestant]] = {
        name: functools.partial(_layer, name, inputs, want, defer) for name, defer in names.items()
    }
    return {**made, GEMMS: functools.partial(_gemms, inputs)}


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another: bfloat16, one rank's experts."""
    note = f"{LOCAL_EXPERTS} local experts of width {INTERMEDIATE}"
    for case in options.cases:
        weights = make_weights(case, "cuda", LOCAL_EXPERTS, INTERMEDIATE)
        for num_tokens in options.tokens or TOKENS:
            chosen = options.choose(contestants(make_inputs(weights, num_tokens, case.top_k)))
            with torch.no_grad():
                outcomes = contest.on_cuda(f"{case.name}, {num_tokens} tokens", chosen)
            del chosen
            yield [
                Record.of("layer", case, num_tokens, "graph", name, outcome, 0, note=note)
                for name, outcome in outcomes.items()
            ]
