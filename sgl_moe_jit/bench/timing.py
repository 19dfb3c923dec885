# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How times are taken: CUDA-graph replays with interleaved providers, and a wall clock on a CPU.

On a GPU each provider's calls, one after another, are captured in one graph; a sample is the time
of a replay between two events, divided by the calls in it. Providers take turns in an order that
changes from round to round, so that a clock or temperature change meets all of them and nobody
always follows the same one; and each replays once before it is timed, so that nobody pays for
writing back another's lines of L2. Cold: the calls' buffers together exceed three times the L2
cache, so a buffer is gone from it when its turn comes again. Hot: every call uses the same buffers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# A graph's replay should take so long that starting it, some microseconds, weighs little ...
_LEAST_GRAPH_US = 1000
# ... without more calls than this: capturing one costs the host some 10 us.
_MOST_CALLS = 1000


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


def copies_for_cold(bytes_per_call: int, cache_bytes: int, at_least: int = 4) -> int:
    """Return how many disjoint calls exceed three times a cache."""
    return max(at_least, 3 * cache_bytes // bytes_per_call + 1)


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the names in another order each round; the same orders in every run."""
    order = list(names)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        yield list(order)


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


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of one replay that follows another of the same graph."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()  # not timed: afterwards L2 holds this provider's lines
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def capture_long(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of the calls, over and over until it is long enough, and its calls' number."""
    graph = capture(calls)
    wanted = math.ceil(_LEAST_GRAPH_US / max(replay_us(graph), 1.0))
    repeats = max(1, min(wanted, _MOST_CALLS // len(calls)))
    if repeats > 1:
        del graph
        graph = capture(calls, repeats)
    return graph, repeats * len(calls)


def sample_graphs(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int = 25, warmup: int = 3
) -> dict[str, list[float]]:
    """Replay each provider's graph in turn; return the microseconds of a call in each sample.

    Args:
        graphs: Provider -> (graph, calls in it).
        rounds: Samples a provider.
        warmup: Rounds that are thrown away.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for i, order in enumerate(turns(list(graphs), warmup + rounds)):
        for name in order:
            graph, calls = graphs[name]
            us = replay_us(graph) / calls
            if i >= warmup:
                samples[name].append(us)
    return samples


def time_graphs(
    graphs: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int = 25, warmup: int = 3
) -> dict[str, Timing]:
    """Summarise ``sample_graphs``."""
    samples = sample_graphs(graphs, rounds, warmup)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_cpu(
    providers: Mapping[str, Sequence[Call]], rounds: int = 25, warmup: int = 2
) -> dict[str, Timing]:
    """Call each provider in turn on a wall clock, each time with the next of the buffers.

    The next after whatever was used last, by whomever: a provider that took the buffers its
    predecessor has just read would find them in the cache.
    """
    samples: dict[str, list[float]] = {name: [] for name in providers}
    used = 0
    for i, order in enumerate(turns(list(providers), warmup + rounds)):
        for name in order:
            calls = providers[name]
            call = calls[used % len(calls)]
            used += 1
            begin = time.perf_counter()
            call()
            if i >= warmup:
                samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}
