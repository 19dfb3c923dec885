# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What the processes of ``bench ep`` are told to do, and what they tell."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from dataclasses import dataclass
from typing import Any

import torch

from sgl_moe_jit.bench import ep_arguments
from sgl_moe_jit.bench.argument_types import typed, typed_outputs
from sgl_moe_jit.bench.ep_layer import CASES
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import Timing

OURS = "sgl_moe_jit"
SEPARATE = "separate shared experts"
WATERFILL = "sgl_moe_jit waterfill"
FIXED = "sgl_moe_jit fixed size"
RANKS = (2, 4)
TOKENS = {"cpu": (64,), "cuda": (128, 1024)}
DEFAULT_CASE = {"cpu": "tiny", "cuda": "deepseek-v3"}
ROUNDS = 25
SKEW = 0.3


@dataclass(frozen=True)
class Job:
    """What all ranks do.

    Attributes:
        case: By name.
        tokens: T of each rank, one measurement for each.
        ranks: W.
        device: cpu or cuda.
        backend: gloo or nccl.
        skew: See :class:`EpLayer`.
        providers: By name, in order.
        waterfill_mode: Of the balancer.
        dynamic: Whether it sees all ranks' counts.
        exchange_choices: Whether it sees all ranks' choices instead.
        rounds: Samples a provider.
    """

    case: str
    tokens: tuple[int, ...]
    ranks: int
    device: str
    backend: str
    skew: float
    providers: tuple[str, ...]
    waterfill_mode: str
    dynamic: bool
    exchange_choices: bool
    rounds: int

    @property
    def threads(self) -> int:
        """Threads of each rank on a CPU."""
        return max(1, len(os.sched_getaffinity(0)) // self.ranks)


@dataclass(frozen=True)
class Measured:
    """One provider on one number of tokens; of all ranks together.

    Attributes:
        provider: By name.
        num_tokens: T of each rank.
        timing: None: its values were wrong.
        worst_share: Largest error of a row, in shares of its norm.
        rows_per_rank: Rows that each rank's experts computed, the shared ones among them.
        routed_rows_per_rank: Without the shared ones.
    """

    provider: str
    num_tokens: int
    timing: Timing | None
    worst_share: float
    rows_per_rank: list[int]
    routed_rows_per_rank: list[int]

    @classmethod
    def of(cls, row: dict[str, Any]) -> Measured:
        """Return what :func:`dataclasses.asdict` was given."""
        took = row.pop("timing")
        return cls(timing=None if took is None else Timing(**took), **row)


@dataclass(frozen=True, kw_only=True)
class EpRecord(Record):
    """A record of ``bench ep``.

    Attributes:
        ranks: W.
        backend: gloo or nccl.
        skew: See :class:`EpLayer`.
        rows_per_rank: See :class:`Measured`, as are the rest.
        routed_rows_per_rank: Likewise.
        worst_share: Likewise.
    """

    ranks: int
    backend: str
    skew: float
    rows_per_rank: list[int]
    routed_rows_per_rank: list[int]
    worst_share: float


def torchrun_rank() -> int | None:
    """Return this process's rank when ``torchrun`` started it, else None."""
    return int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE"} <= {*os.environ} else None


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    """Return what to do for each number of ranks.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ValueError("--device: expected cpu, since torch sees no CUDA device, got cuda")
    world = None if torchrun_rank() is None else int(os.environ["WORLD_SIZE"])
    all_ranks = arguments.ranks or (RANKS if world is None else (world,))
    if world is not None and tuple(all_ranks) != (world,):
        raise ValueError(f"--ranks: expected {world}, as torchrun started, got {all_ranks}")
    names = arguments.cases or (DEFAULT_CASE[device],)
    for name in names:
        if name not in CASES:
            raise ValueError(f"--cases: expected some of {', '.join(CASES)}, got {name!r}")
    tokens = arguments.tokens or TOKENS[device]
    rounds = ROUNDS if arguments.rounds is None else arguments.rounds
    for name, values in (("ranks", all_ranks), ("tokens", tokens), ("rounds", (rounds,))):
        if min(values) < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {min(values)}")
    skew = SKEW if arguments.skew is None else arguments.skew
    if not math.isfinite(skew):
        raise ValueError(f"--skew: expected a finite number, got {skew}")
    _check_waterfill(arguments)
    jobs = []
    for name in names:
        for ranks in all_ranks:
            over = CASES[name].num_experts % ranks
            if over:
                raise ValueError(
                    f"--ranks: expected a divisor of the {CASES[name].num_experts} experts of "
                    f"{name}, got {ranks}"
                )
            backend = arguments.backend or ("nccl" if 0 < ranks <= gpus else "gloo")
            if device == "cpu":
                backend = arguments.backend or "gloo"
            _check_backend(backend, device, ranks, gpus)
            jobs.append(
                Job(
                    case=name,
                    tokens=tuple(tokens),
                    ranks=ranks,
                    device=device,
                    backend=backend,
                    skew=skew,
                    providers=_providers(arguments, device, backend),
                    waterfill_mode=arguments.waterfill_mode or "exact",
                    dynamic=arguments.dynamic,
                    exchange_choices=arguments.exchange_choices,
                    rounds=rounds,
                )
            )
    return jobs


def _check_waterfill(arguments: argparse.Namespace) -> None:
    if not arguments.enable_waterfill:
        for option in typed(arguments, ("dynamic", "exchange_choices", "waterfill_mode"))[:1]:
            raise ValueError(f"{option}: expected --enable-waterfill with it")
    if arguments.exchange_choices:
        if not arguments.dynamic:
            raise ValueError("--exchange-choices: expected --dynamic with it")
        if arguments.waterfill_mode != "exact_restricted":
            raise ValueError(
                "--exchange-choices: expected --waterfill-mode exact_restricted with it, got "
                f"{arguments.waterfill_mode or 'exact, the default'}"
            )


def _check_backend(backend: str, device: str, ranks: int, gpus: int) -> None:
    if backend == "nccl" and device == "cpu":
        raise ValueError("--backend: expected gloo on CPUs, got nccl")
    if backend == "nccl" and ranks > gpus:
        raise ValueError(
            f"--backend: expected gloo for {ranks} ranks on {gpus} GPUs, since NCCL takes one rank "
            "a GPU, got nccl"
        )


def _providers(arguments: argparse.Namespace, device: str, backend: str) -> tuple[str, ...]:
    there = [OURS]
    if arguments.enable_waterfill:
        there.append(WATERFILL)
    if arguments.fixed_size:
        if device == "cuda" and backend == "gloo":
            raise ValueError("--fixed-size: expected nccl or CPUs, since gloo waits for the GPU")
        there.append(FIXED)
    there.append(SEPARATE)
    for name in arguments.providers or ():
        if name not in there:
            raise ValueError(f"--providers: expected some of {', '.join(there)}, got {name!r}")
    return tuple(n for n in there if arguments.providers is None or n in arguments.providers)


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command with placeholders for this machine's paths, and without ``--commit``."""
    ours = ("cases", "tokens", "rounds", "providers", *ep_arguments.BOTH, *ep_arguments.PROCESSES)
    words = ["python", "-m", "sgl_moe_jit", "bench", "ep", *typed(arguments, ours)]
    return shlex.join([*words, *typed_outputs(arguments)])


def record_of(job: Job, result: Measured) -> Record:
    """Return a result as files hold it."""
    case = CASES[job.case]
    assert result.timing is not None
    return EpRecord(
        subject="ep",
        case=case.name,
        num_tokens=result.num_tokens,
        hidden_dim=case.hidden_dim,
        top_k=case.top_k,
        mode="eager",
        weight_dtype="float32",
        provider=result.provider,
        timing=result.timing,
        bytes=0,
        note=f"{job.threads} threads a rank" if job.device == "cpu" else None,
        ranks=job.ranks,
        backend=job.backend,
        skew=job.skew,
        rows_per_rank=result.rows_per_rank,
        routed_rows_per_rank=result.routed_rows_per_rank,
        worst_share=result.worst_share,
    )
