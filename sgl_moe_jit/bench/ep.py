# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench ep``: an MoE block over processes, shared experts fused into the dispatch or separate.

Starts as many processes as ``--ranks`` says, or joins those of ``torchrun``; any number of either.
On CPUs over gloo; on GPUs over NCCL with one rank a GPU, and with more ranks than GPUs over gloo
through the host's memory: that shows that it works, and its times say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_moe_jit.bench import ep_arguments
from sgl_moe_jit.errors import SglMoeJitError

if TYPE_CHECKING:
    from sgl_moe_jit.bench.ep_job import Job, Measured
    from sgl_moe_jit.bench.report import Record, Stamp

logger = logging.getLogger("sgl_moe_jit.bench")


def run(arguments: argparse.Namespace) -> int:
    """Run one of the two ways; returns the exit status.

    Raises:
        ValueError: an argument is wrong, or of the other way.
        SglMoeJitError: a rank failed.
    """
    if arguments.simulate:
        only = (*ep_arguments.PROCESSES, "cases", "modes", "rounds", "providers", "peer", "arch")
        ep_arguments.refuse(arguments, only, "bench ep --simulate")
        from sgl_moe_jit.bench import ep_simulate

        return ep_simulate.run(arguments)
    others = (*ep_arguments.SIMULATOR, "modes", "peer", "arch", "plot")
    ep_arguments.refuse(arguments, others, "bench ep without --simulate")
    return _run_processes(arguments)


def _run_processes(arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import ep_job

    jobs = ep_job.jobs_of(arguments)
    rank = ep_job.torchrun_rank()
    if rank is None:
        return _report(arguments, jobs, start)
    from sgl_moe_jit.bench import ep_ranks

    # One group for all jobs: a store of torchrun's serves one after the other only by chance.
    with ep_ranks.joined(jobs[0], rank, "env://"):
        if rank == 0:  # speaks for all
            return _report(arguments, jobs, lambda job: ep_ranks.measure(job, 0))
        for job in jobs:
            ep_ranks.measure(job, rank)
    return 0


def _report(
    arguments: argparse.Namespace, jobs: Sequence[Job], measure: Callable[[Job], list[Measured]]
) -> int:
    from sgl_moe_jit.bench import ep_job, report

    stamp = report.make_stamp(jobs[0].device, arguments.commit, ep_job.command_line(arguments))
    print(f"{stamp.device}, commit {stamp.commit}")
    print(report.table_head(), flush=True)
    records: list[Record] = []
    failed = False
    for job in jobs:
        results = measure(job)
        new = [ep_job.record_of(job, result) for result in results if result.timing is not None]
        records += new
        _print(job, results, new, stamp)
        for result in results:
            if result.timing is None:
                failed = True
                logger.error(
                    "not timed: %s, %d ranks, %d tokens: a row is off by %.3g of its norm",
                    result.provider,
                    job.ranks,
                    result.num_tokens,
                    result.worst_share,
                )
        if arguments.json:  # after every number of ranks: a run cut short keeps what it has
            report.write_json(records, stamp, arguments.json)
    return 1 if failed else 0


def _print(job: Job, results: Sequence[Measured], records: Sequence[Record], stamp: Stamp) -> None:
    from sgl_moe_jit.bench import report

    for num_tokens in job.tokens:
        shape = [record for record in records if record.num_tokens == num_tokens]
        print("\n".join(report.table_lines(shape, stamp.device)))
        for result in results:
            if result.num_tokens == num_tokens:
                print(
                    f"  {job.ranks} ranks, {job.backend}, {result.provider}: rows a rank "
                    f"{result.rows_per_rank}, routed {result.routed_rows_per_rank}, worst row "
                    f"{result.worst_share:.2e} of its norm from the oracle"
                )
    print(end="", flush=True)


def start(job: Job) -> list[Measured]:
    """Start the job's processes here, and return what they measured.

    Raises:
        SglMoeJitError: one of them failed.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    from sgl_moe_jit.bench import ep_job, ep_ranks

    with tempfile.TemporaryDirectory(prefix="sgl_moe_jit-ep-") as folder:
        try:
            spawn(ep_ranks.worker, (job, folder), nprocs=job.ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise SglMoeJitError(f"bench ep, {job.ranks} ranks: {error}") from error
        text = Path(folder, "results.json").read_text(encoding="utf-8")
    return [ep_job.Measured.of(row) for row in json.loads(text)]
