# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench route``: experts and weights from router logits, beside the same in torch operations.

In CUDA graphs, buffers hot, without the router's own GEMM.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.moe.topk import StandardTopKOutput

TOKENS = (1, 8, 32, 128, 512, 1024, 4096, 16384)
OURS, TORCH = "sgl_moe_jit", "torch"
_CHECKED_ROWS = 512
# Rows in which float32 and float64 may break a near tie differently.
_ALLOWED_ROWS = 0.01
_RELATIVE = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-7}

_V3: dict[str, Any] = {
    "score_function": "sigmoid",
    "has_correction_bias": True,
    "renormalize": True,
    "renormalize_epsilon": 1e-20,
    "routed_scaling_factor": 2.5,
}
_GROUPS = {"n_group": 8, "topk_group": 4}
_SOFTMAX: dict[str, Any] = {"score_function": "softmax", "weights_dtype": "logits"}
_AFTER = {"score_after_top_k": True, "weights_dtype": "logits"}
# By case; logits are bfloat16 where the weights have their dtype.
ROUTING: dict[str, dict[str, Any]] = {
    "deepseek-v3": {**_V3, **_GROUPS},
    "kimi-k2": _V3,
    "kimi-k3": _V3,
    "glm-4.5": _V3,
    "qwen3-235b": {**_SOFTMAX, "renormalize": True},
    "qwen3-30b": {**_SOFTMAX, "renormalize": True},
    "qwen3-next": {**_SOFTMAX, "renormalize": True},
    "gpt-oss-120b": {"score_function": "softmax", **_AFTER},
    "deepseek-v2": {
        "score_function": "softmax",
        "n_group": 8,
        "topk_group": 3,
        "group_rule": "max",
        "routed_scaling_factor": 16.0,
    },
    "llama4": {"score_function": "sigmoid", **_AFTER},
}


@dataclass
class RouteInputs:
    """One call's tensors.

    Attributes:
        logits: [T, E] float32 or bfloat16.
        bias: [E] float32, or None.
        routing: How to choose.
        kept: The last result.
    """

    logits: Tensor
    bias: Tensor | None
    routing: RouterConfig
    kept: StandardTopKOutput | None = field(default=None, repr=False)


def make_inputs(case: FinalizeCase, num_tokens: int, *, device: torch.device | str) -> RouteInputs:
    """Return normal logits, and a bias of a tenth of their size, as the case's model has them.

    Raises:
        ValueError: the case's routing is not described here.
    """
    if case.name not in ROUTING:
        raise ValueError(f"--cases: expected some of {', '.join(ROUTING)}, got {case.name!r}")
    routing = RouterConfig(num_experts=case.num_experts, top_k=case.top_k, **ROUTING[case.name])
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = torch.bfloat16 if routing.weights_dtype == "logits" else torch.float32
    shape = (num_tokens, case.num_experts)
    logits = torch.randn(shape, generator=generator, device=device).to(dtype)
    bias = None
    if routing.has_correction_bias:
        bias = torch.randn(case.num_experts, generator=generator, device=device) * 0.1
    return RouteInputs(logits, bias, routing)


@contextmanager
def _kernel(on: bool) -> Iterator[None]:
    before = os.environ.get(env.ROUTING_KERNEL.name)
    os.environ[env.ROUTING_KERNEL.name] = str(int(on))
    try:
        yield
    finally:
        if before is None:
            del os.environ[env.ROUTING_KERNEL.name]
        else:
            os.environ[env.ROUTING_KERNEL.name] = before


def check(name: str, got: StandardTopKOutput, x: RouteInputs) -> None:
    """Compare the first rows with the torch form in float64 on a CPU.

    Raises:
        WrongResultError: other experts in more rows than near ties explain, or a weight is off.
    """
    logits = x.logits[:_CHECKED_ROWS].double().cpu()
    ids = got.topk_ids[:_CHECKED_ROWS].cpu()
    weights = got.topk_weights[:_CHECKED_ROWS]
    bias = None if x.bias is None else x.bias.double().cpu()
    routing = replace(x.routing, weights_dtype="float32")
    chosen = select_experts(logits, routing, bias).topk_ids
    differing = int((chosen != ids).any(-1).sum())
    if differing > _ALLOWED_ROWS * len(ids) + 1:
        raise WrongResultError(f"{name}: other experts in {differing} of {len(ids)} rows")
    weighed = replace(routing, has_correction_bias=False)
    want = select_experts(logits, weighed, topk_ids=ids).topk_weights
    error = ((weights.cpu().double() - want).abs() / want.abs().clamp(min=1e-30)).max()
    if not float(error) <= _RELATIVE[weights.dtype]:
        raise WrongResultError(f"{name}: a weight is off by {float(error):.3g} of its size")


def _enter(name: str, x: RouteInputs) -> Contestant:
    def call() -> None:
        with _kernel(name == OURS):
            x.kept = select_experts(x.logits, x.routing, x.bias)

    def run_and_check() -> None:
        call()
        assert x.kept is not None
        check(name, x.kept, x)

    return Contestant([call], run_and_check)


def route_bytes(x: RouteInputs) -> int:
    """Return the bytes that one call must move: logits in, ids and weights out."""
    num_tokens, num_experts = x.logits.shape
    item = x.logits.element_size()
    weight = item if x.routing.weights_dtype == "logits" else 4
    return num_tokens * (num_experts * item + x.routing.top_k * (4 + weight))


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another."""
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            x = make_inputs(case, num_tokens, device="cuda")
            made: dict[str, Callable[[], Contestant]] = {
                name: functools.partial(_enter, name, x) for name in (OURS, TORCH)
            }
            outcomes = contest.on_cuda(f"{case.name}, {num_tokens} tokens", options.choose(made))
            size = route_bytes(x)
            yield [
                Record.of("route", case, num_tokens, "hot", name, outcome, size)
                for name, outcome in outcomes.items()
            ]
