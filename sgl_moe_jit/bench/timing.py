# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How times are taken: CUDA-graph replays with interleaved providers, and a wall clock on a CPU.

On a GPU each provider's calls, one after another, are captured in one graph; a sample is the time
of a replay between two events, divided by the calls in it. Providers take turns, so that a clock or
temperature change meets all of them, and each replays once before it is timed, so that nobody pays
for writing back another's lines of L2. Cold: the calls' buffers together exceed three times the L2
cache, so a buffer is gone from it when its turn comes again. Hot: every call uses the same buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over many samples."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples in microseconds."""
        ordered = sorted(samples)

        def quantile(q: float) -> float:
            return ordered[min(len(ordered) - 1, int(q * len(ordered)))]

        return cls(quantile(0.5), quantile(0.2), quantile(0.8), len(ordered))

    def text_ms(self) -> str:
        """Return median and spread in milliseconds."""
        median, low, high = (x / 1e3 for x in (self.median_us, self.p20_us, self.p80_us))
        return f"{median:.1f} ms (p20 {low:.1f}, p80 {high:.1f}, {self.samples} samples)"


def copies_for_cold(bytes_per_call: int, cache_bytes: int, at_least: int = 4) -> int:
    """Return how many disjoint calls exceed three times a cache."""
    return max(at_least, 3 * cache_bytes // bytes_per_call + 1)


def capture(calls: Sequence[Call], repeats: int = 1) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls in order, ``repeats`` times over; the first runs once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return graph


def time_graphs(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int = 25, warmup: int = 3
) -> dict[str, Timing]:
    """Replay each provider's graph in turn.

    Args:
        graphs: Provider -> (graph, calls in it).
        rounds: Samples a provider.
        warmup: Rounds that are thrown away.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(warmup + rounds):
        for name, (graph, calls) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # not timed: afterwards L2 holds this provider's lines
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= warmup:
                samples[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_cpu(
    providers: Mapping[str, Sequence[Call]], rounds: int = 25, warmup: int = 2
) -> dict[str, Timing]:
    """Call each provider in turn on a wall clock, each round with the next of its buffers."""
    samples: dict[str, list[float]] = {name: [] for name in providers}
    for i in range(warmup + rounds):
        for name, calls in providers.items():
            call = calls[i % len(calls)]
            begin = time.perf_counter()
            call()
            if i >= warmup:
                samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}
