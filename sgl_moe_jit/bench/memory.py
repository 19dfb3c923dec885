# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench memory``: what a whole MoE layer allocates at most, in each order, and transformers'.

Bytes by ``torch.cuda.max_memory_allocated`` over one eager call on one stream, above what was
allocated before it, after two calls to warm up. The output is counted, input and weights are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sgl_moe_jit.bench.contest import Contest, Contestant, Outcome
from sgl_moe_jit.bench.layer import STOCK, checked, contestants, wanted
from sgl_moe_jit.bench.layer_cases import batches
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.deferred import finalize_output

TOKENS = (1024, 2048, 4096, 8192, 16384)
_WARMUP = 2


def shared_first(block: SharedExpertMoEBlock, x: Tensor) -> Tensor:
    """Shared experts before the routed ones, which finish their own output: the eager order."""
    assert block.shared_experts is not None
    shared = block.shared_experts(x)
    routed = block.experts(x, block._route(x), defer=False)
    return finalize_output(routed, shared)


def rows_kept(block: SharedExpertMoEBlock, x: Tensor) -> Tensor:
    """Rows handed over, then the shared experts: what deferral alone would do to a prefill."""
    assert block.shared_experts is not None
    routed = block.experts(x, block._route(x), defer=True)
    return finalize_output(routed, block.shared_experts(x))


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates at most."""
    for _ in range(_WARMUP):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def contestants_by_order(
    stock: torch.nn.Module, block: SharedExpertMoEBlock, x: Tensor
) -> dict[str, Callable[[], Contestant]]:
    """Return what makes each contestant, by name, ours first."""
    every = contestants(stock, block, x)
    made = {name: every[name] for name in ("sgl_moe_jit", STOCK)}
    if block.shared_experts is not None:
        want = wanted(stock, block, x)
        for word, order in (("shared first", shared_first), ("rows kept", rows_kept)):
            name, call = f"sgl_moe_jit, {word}", functools.partial(order, block, x)
            made[name] = functools.partial(checked, name, call, want)
    return made


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one layer after another: bfloat16, one rank's experts."""
    for batch in batches(options.cases, options.tokens or TOKENS):
        case, note, num_tokens = batch.case, batch.layer.describe(), len(batch.x)
        with torch.no_grad():
            makers = options.choose(contestants_by_order(batch.stock, batch.block, batch.x))
            entered = contest.enter(f"{case.name}, {num_tokens} tokens", makers)
            peaks = {name: peak_bytes(one.calls[0]) for name, one in entered.items()}
        del makers, entered, batch
        nothing = Outcome(None, None)
        yield [
            Record.of(
                *("memory", case, num_tokens, "eager", name, nothing, 0),
                note=note,
                peak_bytes=peak,
            )
            for name, peak in peaks.items()
        ]
