# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The practical roofline: a kernel that streams an op's bytes and computes nothing else.

It adds K planes and one more, each as large as the output, value by value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sgl_moe_jit.bench import kernels, timing
from sgl_moe_jit.bench.cases import FinalizeCase, FinalizeInputs
from sgl_moe_jit.bench.checks import ROUNDING, compare
from sgl_moe_jit.bench.contest import Contestant
from sgl_moe_jit.bench.timing import Call
from sgl_moe_jit.jit import parallel

_VEC = 8  # values an access
_TRIALS = 3
_TRIAL_CALLS = 100  # enough to tell launch shapes apart

Launch = tuple[bool, int, int]  # deep, threads a block, blocks
Planes = tuple[Tensor, Tensor, Tensor]  # [K * N], [N], and the output [N]


def launches(numel: int, num_sms: int) -> Iterator[Launch]:
    """Yield the launch shapes worth trying for an output of ``numel`` values.

    One vector a thread; or, where that is several waves, as many blocks as find a place at once,
    each of which goes on through the rest.
    """
    vectors = numel // _VEC
    for deep in (True, False):
        for threads in (128, 256, 512):
            blocks = -(-vectors // threads)
            yield deep, threads, blocks
            resident = num_sms * ((1024 if deep else 2048) // threads)
            if blocks > resident:
                yield deep, threads, resident


def planes(case: FinalizeCase, x: FinalizeInputs) -> Planes:
    """Return the call's own stretch of the pool as [K * N], shared as [N], and out as [N]."""
    numel = x.out.numel()
    first = x.first_row * case.padded_hidden_dim
    rows = x.gemm2_out.view(-1)[first : first + case.top_k * numel]
    return rows, x.shared_output.view(-1), x.out.view(-1)


def _check(top_k: int, view: Planes, call: Call) -> None:
    rows, shared, out = view
    out.fill_(float("nan"))
    call()
    n = min(out.numel(), 1 << 19)  # float64 copies of everything would fill the GPU
    terms = torch.cat([rows.view(top_k, -1)[:, :n], shared[None, :n]]).double()
    want, magnitude = terms.sum(0), terms.abs().sum(0)
    allowed = ROUNDING * want.abs() + (top_k + 1) * 2.0**-23 * magnitude + 2.0**-134
    compare("stream", "out", out.view(-1), want, allowed)


def build(top_ks: Sequence[int]) -> None:
    """Build the kernels of these top_k side by side."""
    parallel.run_all(kernels.stream, top_ks)


def of_planes(top_k: int, views: Sequence[Planes]) -> Contestant:
    """Return the streaming kernel in the fastest of its launch shapes, each timed shortly."""
    kernel = kernels.stream(top_k)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def calls_of(launch: Launch) -> list[Call]:
        return [
            functools.partial(kernel, out, rows, shared, *launch) for rows, shared, out in views
        ]

    def took_us(launch: Launch) -> float:
        calls = calls_of(launch)
        graph = timing.capture(calls, max(1, _TRIAL_CALLS // len(calls)))
        return min(timing.replay_us(graph) for _ in range(_TRIALS))

    best = min(launches(views[0][2].numel(), num_sms), key=took_us)
    deep, threads, blocks = best
    calls = calls_of(best)
    note = f"{'deep' if deep else 'wide'}, {blocks} blocks of {threads} threads"
    return Contestant(calls, functools.partial(_check, top_k, views[0], calls[0]), note)


def contestant(case: FinalizeCase, inputs: Sequence[FinalizeInputs]) -> Contestant:
    """Return the kernel that moves a finalize's bytes, in the finalize's own memory."""
    return of_planes(case.top_k, [planes(case, x) for x in inputs])
