# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench finalize``: the fused op beside its peers, and beside the bytes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from sgl_moe_jit.bench import peers, stream
from sgl_moe_jit.bench.cases import FinalizeCase, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.checks import check_provider
from sgl_moe_jit.bench.contest import Contest, Contestant
from sgl_moe_jit.bench.model import finalize_bytes
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import copies_for_cold

HOT_LIMIT = 256  # tokens; above, one call's rows fill the cache by themselves
# Sizes of decode, of a chunk, and of prefill.
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
STREAM = "stream"

# Makes one shape's contestant.
Entry = Callable[[FinalizeCase, Sequence[FinalizeInputs]], Contestant]


def modes_of(num_tokens: int, wanted: Sequence[str]) -> list[str]:
    """Return which of the wanted modes say something at this size."""
    return [mode for mode in wanted if mode == "cold" or num_tokens <= HOT_LIMIT]


def l2_bytes() -> int:
    """Return the size of the current GPU's L2 cache."""
    size: int = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return size


def enter(
    name: str, provider: peers.Provider, case: FinalizeCase, inputs: Sequence[FinalizeInputs]
) -> Contestant:
    """Return a provider's calls on one shape, with the check against the oracle."""
    calls = provider(inputs, case.top_k)
    check = functools.partial(check_provider, name, calls[0], inputs[0], case.top_k)
    return Contestant(calls, check)


def entries(
    folders: Mapping[str, Path], cases: Sequence[FinalizeCase]
) -> dict[str, Callable[[], Entry]]:
    """Return what makes each provider of the subject, by name."""
    top_ks = sorted({case.top_k for case in cases})

    def entry(name: str, make: Callable[[], peers.Provider]) -> Entry:
        return functools.partial(enter, name, make())

    def streaming() -> Entry:
        stream.build(top_ks)
        return stream.contestant

    found: dict[str, Callable[[], Entry]] = {
        name: functools.partial(entry, name, make)
        for name, make in peers.providers(folders, top_ks).items()
    }
    return {**found, STREAM: streaming}


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another: bfloat16 rows, float32 weights."""
    cache = l2_bytes()
    made = contest.prepare(options.choose(entries(options.folders, options.cases)))
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
            for mode in modes_of(num_tokens, options.modes):
                past = cache if mode == "cold" else None
                copies = copies_for_cold(size, past) if past else 1
                inputs = make_finalize_inputs(case, num_tokens, copies, device="cuda")
                outcomes = contest.on_cuda(
                    f"{case.name}, {num_tokens} tokens, {mode}",
                    {name: functools.partial(entry, case, inputs) for name, entry in made.items()},
                )
                del inputs
                yield [
                    Record.of("finalize", case, num_tokens, mode, name, outcome, size, past)
                    for name, outcome in outcomes.items()
                ]
