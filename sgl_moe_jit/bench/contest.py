# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One shape's comparison: each provider is made, checked, captured, and then all take turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from sgl_moe_jit.bench import timing
from sgl_moe_jit.bench.timing import Call, Timing
from sgl_moe_jit.jit import parallel

logger = logging.getLogger("sgl_moe_jit.bench")

T = TypeVar("T")


class WrongResultError(RuntimeError):
    """A provider's values are not those of the float64 oracle; it is not timed."""


@dataclass(frozen=True)
class Contestant:
    """One provider on one shape.

    Attributes:
        calls: One for each set of buffers.
        check: Runs the first call and compares what it wrote with the oracle.
        note: What the record should say about it.
    """

    calls: Sequence[Call]
    check: Callable[[], None]
    note: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A provider's time, where one was taken, and its note."""

    timing: Timing | None
    note: str | None


@dataclass
class Contest:
    """How the contestants of a run are timed, and which of them failed.

    Attributes:
        rounds: Samples a provider.
        failures: One line for each provider that could not be timed on some shape.
    """

    rounds: int = 25
    failures: list[str] = field(default_factory=list)

    def _failed(self, where: str, name: str, error: Exception) -> None:
        """Note that a provider is left out; the others are still worth their device time."""
        first = (str(error).splitlines() or [""])[0]
        line = f"{where}: {name}: {type(error).__name__}: {first}"
        trace = None if isinstance(error, WrongResultError) else error
        logger.error("not timed: %s", line, exc_info=trace)
        self.failures.append(line)

    def prepare(self, makers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make the providers, their modules side by side; one that fails is left out."""

        def attempt(make: Callable[[], T]) -> T | Exception:
            try:
                return make()
            except Exception as error:
                return error

        made = {}
        results = parallel.run_all(attempt, list(makers.values()))
        for name, result in zip(makers, results, strict=True):
            if isinstance(result, Exception):
                self._failed("build", name, result)
            else:
                made[name] = result
        return made

    def enter(
        self, shape: str, contestants: Mapping[str, Callable[[], Contestant]]
    ) -> dict[str, Contestant]:
        """Make and check every contestant; one that fails is left out."""
        entered = {}
        for name, make in contestants.items():
            try:
                contestant = make()
                contestant.check()
                entered[name] = contestant
            except Exception as error:
                self._failed(shape, name, error)
        return entered

    def on_cuda(
        self, shape: str, contestants: Mapping[str, Callable[[], Contestant]], *, captures: int = 1
    ) -> dict[str, Outcome]:
        """Time the contestants of one shape in CUDA graphs.

        Args:
            shape: Names it in messages.
            contestants: What makes each, by name.
            captures: Among how many graphs of each the rounds are divided. A graph's buffers lie
                where its capture found room, and two captures of the same calls can differ by 3 %
                for it. Each time another one comes first.
        """
        entered = self.enter(shape, contestants)
        samples: dict[str, list[float]] = {}
        for i in range(captures):
            first = i * len(entered) // captures
            names = list(entered)
            graphs = {}
            for name in (*names[first:], *names[:first]):
                try:
                    graphs[name] = timing.capture_long(entered[name].calls)
                except Exception as error:
                    self._failed(shape, name, error)
                    del entered[name]
            rounds = -(-self.rounds // captures)
            for name, taken in timing.sample_graphs(graphs, rounds).items():
                samples.setdefault(name, []).extend(taken)
            del graphs
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return {
            name: Outcome(Timing.of(samples[name]), contestant.note)
            for name, contestant in entered.items()
        }

    def on_cpu(
        self, shape: str, contestants: Mapping[str, Callable[[], Contestant]]
    ) -> dict[str, Outcome]:
        """Time the contestants of one shape on a wall clock."""
        entered = self.enter(shape, contestants)
        times = timing.time_cpu({name: x.calls for name, x in entered.items()}, self.rounds)
        return {name: Outcome(times[name], x.note) for name, x in entered.items()}
