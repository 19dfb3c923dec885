# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench norm``: finalize, residual add and RMSNorm in one kernel, beside two and torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from sgl_moe_jit.bench import finalize, norm_peers, stream
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.checks import CHECKED_TOKENS, ROUNDING, compare, head_rows, magnitude
from sgl_moe_jit.bench.contest import Contest, Contestant
from sgl_moe_jit.bench.model import norm_bytes
from sgl_moe_jit.bench.norm_inputs import EPS, NormCall, NormInputs, Provider, make_norm_inputs
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import copies_for_cold
from sgl_moe_jit.ops import reference

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def check(name: str, call: NormCall, x: NormInputs, top_k: int) -> None:
    """Compare both results with float64 on the first tokens.

    With s = finalize + residual: ``residual_out = s`` may be off by three roundings to bfloat16 of
    the terms, as for a finalize. In ``out = s / rms(s) * weight`` that error is scaled, rms(s) is
    off by no more than the errors' own rms, and the result is rounded once, in FP8 to three bits
    (2^-4, and half of 2^-9 times the scale where it is subnormal).

    Raises:
        WrongResultError: it is wrong.
    """
    call.out.fill_(float("nan"))
    call.run()
    head = head_rows(x.base, top_k, CHECKED_TOKENS)
    n = head[2].shape[0]
    residual = x.residual[:n].double()
    total = reference.moe_finalize_fuse_shared(*head, top_k) + residual
    allowed = 3 * ROUNDING * (magnitude(*head, top_k) + residual.abs())
    compare(name, "residual_out", call.residual_out, total, allowed)
    rms = (total.square().mean(-1, keepdim=True) + EPS).sqrt()
    weight = x.weight.double()
    want = total / rms * weight
    relative = ROUNDING + allowed.square().mean(-1, keepdim=True).sqrt() / rms
    bound = allowed / rms * weight.abs() + relative * want.abs()
    if call.scale is not None:
        bound = bound + 2.0**-4 * want.abs() + 2.0**-10 * call.scale[:n]
    compare(name, "out", call.result(), want, bound)


def _enter(
    name: str, provider: Provider, case: FinalizeCase, inputs: Sequence[NormInputs]
) -> Contestant:
    calls = provider(inputs, case.top_k)
    return Contestant(
        [call.run for call in calls],
        functools.partial(check, name, calls[0], inputs[0], case.top_k),
    )


Entry = Callable[[FinalizeCase, Sequence[NormInputs]], Contestant]


def _streaming(case: FinalizeCase, inputs: Sequence[NormInputs]) -> Contestant:
    """Return the kernel that moves as many bytes: one plane more in, and one less out.

    The rows, shared output and residual come in and two results go out; it has one result, and
    less to write is no slower.
    """
    rows = case.top_k + 2
    views = []
    for x in inputs:
        planes = torch.empty(rows + 1, x.residual.numel(), dtype=x.residual.dtype, device="cuda")
        planes.normal_()
        views.append((planes[:rows].view(-1), planes[rows], x.residual_out.view(-1)))
    return stream.of_planes(rows, views)


def entries(options: Options) -> dict[str, Callable[[], Entry]]:
    """Return what makes each provider's contestants, by name, ours first."""
    top_ks = sorted({case.top_k for case in options.cases})

    def entry(name: str, make: Callable[[], Provider]) -> Entry:
        return functools.partial(_enter, name, make())

    def streaming() -> Entry:
        stream.build([top_k + 2 for top_k in top_ks])
        return _streaming

    made = norm_peers.providers(options.folders, top_ks)
    found = {name: functools.partial(entry, name, make) for name, make in made.items()}
    return {**found, finalize.STREAM: streaming}


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another: bfloat16 rows, float32 weights."""
    cache = finalize.l2_bytes()
    made = contest.prepare(options.choose(entries(options)))
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            size = norm_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
            for mode in finalize.modes_of(num_tokens, options.modes):
                past = cache if mode == "cold" else None
                copies = copies_for_cold(size, past) if past else 1
                inputs = make_norm_inputs(case, num_tokens, copies, device="cuda")
                outcomes = contest.on_cuda(
                    f"{case.name}, {num_tokens} tokens, {mode}",
                    {name: functools.partial(entry, case, inputs) for name, entry in made.items()},
                )
                del inputs
                torch.cuda.empty_cache()
                yield [
                    Record.of("norm", case, num_tokens, mode, name, outcome, size, past)
                    for name, outcome in outcomes.items()
                ]
