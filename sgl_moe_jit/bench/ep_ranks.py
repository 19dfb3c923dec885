# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What one rank of ``bench ep`` does: make its part, check it against the oracle, then be timed.

A sample is the time from a barrier to the end of the slowest rank's call. Nothing is timed before
every rank's output has been compared with the oracle's, which no rank took part in.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_moe_jit.bench import timing
from sgl_moe_jit.bench.ep_job import FIXED, SEPARATE, WATERFILL, Job, Measured
from sgl_moe_jit.bench.ep_layer import CASES, EpLayer
from sgl_moe_jit.bench.timing import Timing
from sgl_moe_jit.ep.balance import WaterfillBalancer
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath, SharedExpander
from sgl_moe_jit.moe.layer import FusedMoE

# Three roundings to bfloat16 along the way, of random sign over many terms, stay well below this
# share of a row's norm; a wrong expert, weight or token, or a shared expert twice, does not.
_ALLOWED = 2.0**-6
_CHECKED_TOKENS = 16
_WARMUP = 3
_TIMEOUT = datetime.timedelta(minutes=5)


class _Counting:
    """Remembers how many of a call's rows go to each rank."""

    def __init__(self, expand: SharedExpander | None, layout: EpLayout, separate: bool) -> None:
        self.expand, self.layout, self.separate = expand, layout, separate
        self.routed: Tensor | None = None
        self.all: Tensor | None = None

    def record(self, ids: Tensor) -> None:
        owner = ids[ids >= 0] // self.layout.num_local_routed
        self.routed = self.all = torch.bincount(owner, minlength=self.layout.ep_size).cpu()

    def __call__(
        self, topk_ids: Tensor, topk_weights: Tensor, shared_weight: float
    ) -> tuple[Tensor, Tensor]:
        assert self.expand is not None
        ids, weights = self.expand(topk_ids, topk_weights, shared_weight)
        owner = ids[ids >= 0] // self.layout.num_local
        self.all = torch.bincount(owner, minlength=self.layout.ep_size).cpu()
        return ids, weights


class Rank:
    """One rank: its part of the layer, and the providers on it.

    Args:
        job: What to do.
        group: The ranks.
        device: Of this one.
    """

    def __init__(self, job: Job, group: Any, device: torch.device) -> None:
        self.job, self.group, self.device = job, group, device
        self.rank = group.rank()
        case = CASES[job.case]
        self.layout = EpLayout(case.num_experts, ep_size=job.ranks)
        self.layer = EpLayer(case, device, job.skew)
        self.gate = self.layer.gate()
        fused = self.layer.experts(self.layout, self.rank)
        routed = (p.detach()[: self.layout.num_local_routed] for p in fused.parameters())
        self.blocks = {
            True: SharedExpertMoEBlock(self.gate, fused, shared_is_fused=True),
            False: SharedExpertMoEBlock(
                self.gate, FusedMoE.from_w13_w2(*routed), self.layer.shared()
            ),
        }

    def call_of(self, provider: str, x: Tensor, count: bool) -> tuple[Callable[[], Tensor], Any]:
        """Return the provider's call on ``x``, and what counts its rows."""
        fused = provider != SEPARATE
        layout = self.layout if fused else EpLayout(self.layout.num_experts, 0, self.job.ranks, 0)
        staged = self.device.type == "cuda" and self.job.backend == "gloo"
        dispatcher = TorchDispatcher(
            self.group,
            layout.num_local,
            sum_at="experts" if provider == FIXED else "source",
            stage_through_host=staged,
            max_tokens_per_rank=max(self.job.tokens) if provider == FIXED else None,
        )
        counting = _Counting(self._expander(provider, len(x)), self.layout, not fused)
        expand = (counting if count else counting.expand) if fused else None
        record = counting.record if count else None
        path = ExpertParallelPath(dispatcher, expand, record=record)
        block = self.blocks[fused]
        return lambda: block.forward_deepep(x, path), counting

    def _expander(self, provider: str, num_tokens: int) -> SharedExpander:
        if provider != WATERFILL:
            return HomeExpander(self.layout, self.rank)
        job = self.job
        return WaterfillBalancer(
            self.layout,
            self.rank,
            mode=job.waterfill_mode,
            group=self.group if job.dynamic else None,
            dynamic=job.dynamic,
            max_tokens_per_rank=num_tokens if job.exchange_choices else None,
        )

    def check(self, provider: str, x: Tensor) -> tuple[float, list[int], list[int]]:
        """Return the worst row's error over all ranks, and the rows of each rank."""
        call, counting = self.call_of(provider, x, count=True)
        got = call()
        some = torch.linspace(0, max(len(x) - 1, 0), min(len(x), _CHECKED_TOKENS)).round().long()
        some = some.to(self.device)
        want = self.layer.oracle(x[some], self._choice(x, some))
        error = (got[some].double() - want).norm(dim=-1) / want.norm(dim=-1)
        worst = float(error.max().nan_to_num(nan=float("inf"))) if len(some) else 0.0
        if counting.separate:  # computed at home, outside the dispatch
            counting.all = counting.routed.clone()
            counting.all[self.rank] += len(x)
        return (
            float(self._reduce(torch.tensor([worst]), dist.ReduceOp.MAX)),
            self._reduce(counting.all, dist.ReduceOp.SUM).tolist(),
            self._reduce(counting.routed, dist.ReduceOp.SUM).tolist(),
        )

    def _choice(self, x: Tensor, some: Tensor) -> Any:
        choice = self.gate(x)
        return type(choice)(choice.topk_weights[some], choice.topk_ids[some], 2.5)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        """Return values of all ranks, reduced, on the host."""
        sent = values.to(self.device if self.job.backend == "nccl" else "cpu")
        dist.all_reduce(sent, operation, group=self.group)
        return sent.cpu()

    def _finished(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, calls: dict[str, Callable[[], Tensor]]) -> dict[str, Timing]:
        """Call each provider in turn, all ranks in the same order."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for i, order in enumerate(timing.turns(list(calls), _WARMUP + self.job.rounds)):
            for name in order:
                self._finished()
                dist.barrier(group=self.group)
                begin = time.perf_counter()
                calls[name]()
                self._finished()
                if i >= _WARMUP:
                    samples[name].append((time.perf_counter() - begin) * 1e6)
        return {
            name: Timing.of(self._reduce(torch.tensor(took), dist.ReduceOp.MAX).tolist())
            for name, took in samples.items()
        }

    def measure(self, num_tokens: int) -> list[Measured]:
        """Check every provider, and time those that are right."""
        x = self.layer.tokens(self.rank, num_tokens)
        checked = {name: self.check(name, x) for name in self.job.providers}
        right = [name for name, (worst, _, _) in checked.items() if worst <= _ALLOWED]
        times = self.time({name: self.call_of(name, x, count=False)[0] for name in right})
        return [
            Measured(name, num_tokens, times.get(name), *checked[name])
            for name in self.job.providers
        ]


def _place(job: Job, rank: int) -> torch.device:
    """Return a rank's device, made this process's own."""
    if job.device == "cpu":
        torch.set_num_threads(job.threads)
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def measure(job: Job, rank: int) -> list[Measured]:
    """Measure as one rank of the default group, which exists."""
    with torch.no_grad():
        me = Rank(job, dist.group.WORLD, _place(job, rank))
        return [result for count in job.tokens for result in me.measure(count)]


@contextlib.contextmanager
def joined(job: Job, rank: int, method: str) -> Iterator[None]:
    """Be in the default group while inside.

    Args:
        job: Says which backend, and how many ranks.
        rank: Of this process.
        method: As of ``torch.distributed.init_process_group``.
    """
    device = _place(job, rank)
    dist.init_process_group(
        job.backend,
        init_method=method,
        rank=rank,
        world_size=job.ranks,
        timeout=_TIMEOUT,
        device_id=device if job.backend == "nccl" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def worker(rank: int, job: Job, folder: str) -> None:
    """Entry of a process that was started here; rank 0 leaves the results in ``folder``."""
    with joined(job, rank, f"file://{folder}/store"):
        results = measure(job, rank)
    if rank == 0:
        rows = [asdict(result) for result in results]
        Path(folder, "results.json").write_text(json.dumps(rows), encoding="utf-8")
