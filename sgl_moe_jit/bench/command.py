# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m sgl_moe_jit bench``: what its arguments mean and which subject they run."""

from __future__ import annotations

import argparse
import importlib
import logging
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_moe_jit.bench import ep_arguments
from sgl_moe_jit.bench.argument_types import names, numbers, typed, typed_outputs

if TYPE_CHECKING:
    from sgl_moe_jit.bench.contest import Contest
    from sgl_moe_jit.bench.options import Options
    from sgl_moe_jit.bench.report import Record

logger = logging.getLogger("sgl_moe_jit.bench")


@dataclass(frozen=True)
class Subject:
    """One thing to measure.

    Attributes:
        name: As typed; also the name of its module, which has ``bench(options, contest)``.
        devices: Where it can run, the preferred one first.
        arguments: Which of the shared arguments mean something to it.
        rounds: Samples a provider, unless the command line says otherwise.
    """

    name: str
    devices: tuple[str, ...]
    arguments: tuple[str, ...] = ("cases", "tokens", "rounds", "providers", "plot")
    rounds: int = 25


_GPU_ARGUMENTS = ("cases", "tokens", "modes", "rounds", "providers", "plot", "peer")
SUBJECTS = (
    Subject("finalize", ("cuda",), _GPU_ARGUMENTS),
    Subject("norm", ("cuda",), _GPU_ARGUMENTS),
    Subject("permute", ("cuda",), _GPU_ARGUMENTS[:-1]),
    Subject("waterfill", ("cuda",), ("cases", "tokens", "rounds", "providers", "plot", "peer")),
    Subject("route", ("cuda",)),
    Subject("layer", ("cuda",)),
    Subject("memory", ("cuda",), ("cases", "tokens", "providers", "plot")),
    Subject("host", ("cuda", "cpu"), ("rounds", "peer", "providers"), rounds=200),
    Subject("cpu", ("cpu",), rounds=75),
    Subject("jit", ("cpu",), ("arch",)),
)
_BY_NAME = {subject.name: subject for subject in SUBJECTS}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.usage = "%(prog)s [SUBJECT] [options]"
    subjects = ("all", *_BY_NAME, "ep")
    parser.add_argument(
        "subject",
        nargs="?",
        default="all",
        choices=subjects,
        metavar="SUBJECT",
        help=f"{', '.join(subjects)}; default: all that this machine can run, but ep, which "
        "starts processes",
    )
    parser.add_argument(
        "--cases", type=names, metavar="NAME[,NAME...]", help="default: deepseek-v3; or all"
    )
    parser.add_argument("--tokens", type=numbers, metavar="T[,T...]")
    parser.add_argument("--modes", type=names, metavar="hot,cold")
    parser.add_argument("--rounds", type=int, metavar="N", help="samples a provider")
    parser.add_argument(
        "--providers", type=names, metavar="NAME[,NAME...]", help="default: all there are"
    )
    parser.add_argument(
        "--peer",
        action="append",
        metavar="NAME=DIR",
        help="sources of sglang or flashinfer; see sgl_moe_jit/bench/kernels.py",
    )
    parser.add_argument("--arch", help="target of bench jit, default: 9.0a")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNGs there")
    parser.add_argument("--commit", help="of the tree that runs; default: git's")
    ep_arguments.add_arguments(parser)


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command with placeholders for this machine's paths, and without ``--commit``."""
    words = ["python", "-m", "sgl_moe_jit", "bench", arguments.subject]
    words += typed(arguments, ("cases", "tokens", "modes", "rounds", "providers", "arch"))
    for peer in arguments.peer or ():
        words += ["--peer", f"{peer.partition('=')[0]}=DIR"]
    return shlex.join([*words, *typed_outputs(arguments)])


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse an argument that the one subject named would ignore.

    Raises:
        ValueError: names it.
    """
    subject = _BY_NAME[arguments.subject]
    for name in (*_GPU_ARGUMENTS, "arch"):
        if getattr(arguments, name) is not None and name not in subject.arguments:
            raise ValueError(f"--{name}: means nothing to bench {subject.name}; leave it out")
    ep_arguments.refuse(arguments, ep_arguments.NAMES, f"bench {subject.name}")


def _options(arguments: argparse.Namespace) -> Options:
    from sgl_moe_jit.bench.cases import cases_named
    from sgl_moe_jit.bench.kernels import parse_peers
    from sgl_moe_jit.bench.options import Options

    modes = arguments.modes or ("hot", "cold")
    for mode in modes:
        if mode not in ("hot", "cold"):
            raise ValueError(f"--modes: expected hot, cold or both, got {mode!r}")
    if any(tokens < 1 for tokens in arguments.tokens or ()):
        raise ValueError(f"--tokens: expected numbers of at least 1, got {arguments.tokens}")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise ValueError(f"--rounds: expected 1 or more, got {arguments.rounds}")
    return Options(
        cases=cases_named(arguments.cases or ("deepseek-v3",)),
        tokens=arguments.tokens,
        modes=modes,
        folders=parse_peers(arguments.peer or []),
        providers=arguments.providers,
        arch=arguments.arch or "9.0a",
    )


def _device_of(subject: Subject) -> str:
    import torch

    available = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for device in subject.devices:
        if device in available:
            return device
    raise ValueError(
        f"bench {subject.name}: needs a CUDA device, and torch.cuda.is_available() is False; "
        "bench cpu, host, jit and ep do not"
    )


def _measure(subject: Subject, options: Options, contest: Contest) -> Iterator[list[Record]]:
    module = importlib.import_module(f"sgl_moe_jit.bench.{subject.name}")
    shapes: Iterator[list[Record]] = module.bench(options, contest)
    return shapes


def _run_one(subject: Subject, arguments: argparse.Namespace) -> int:
    from sgl_moe_jit.bench import plot, report
    from sgl_moe_jit.bench.contest import Contest

    options = _options(arguments)
    device = _device_of(subject)
    if arguments.plot:
        plot.require_matplotlib()  # before the measurement, not after it
    stamp = report.make_stamp(device, arguments.commit, command_line(arguments), options.folders)
    contest = Contest(arguments.rounds or subject.rounds)
    records: list[Record] = []
    print(f"{stamp.device}, commit {stamp.commit}")
    print(report.table_head(), flush=True)
    for shape in _measure(subject, options, contest):
        records += shape
        print("\n".join(report.table_lines(shape, stamp.device)), flush=True)
        if arguments.json:  # after every shape: a run that is cut short keeps what it has
            report.write_json(records, stamp, arguments.json)
    if arguments.plot:
        for path in plot.draw(report.to_json(records, stamp), arguments.plot):
            print(path)
    for failure in contest.failures:  # again, at the end, where they are seen
        logger.error("not timed: %s", failure)
    return 1 if contest.failures else 0


def run(arguments: argparse.Namespace) -> int:
    """Run the subjects, print their tables, write their records; 1 when a provider failed."""
    if arguments.subject == "ep":
        from sgl_moe_jit.bench import ep

        return ep.run(arguments)
    import torch

    if arguments.subject != "all":
        _refuse_unused(arguments)
        return _run_one(_BY_NAME[arguments.subject], arguments)
    if arguments.json or arguments.plot or arguments.providers:
        raise ValueError(
            "--json, --plot, --providers: expected one subject, got all; a file holds one "
            "comparison"
        )
    ep_arguments.refuse(arguments, ep_arguments.NAMES, "all subjects together")
    status = 0
    for subject in SUBJECTS:
        if torch.cuda.is_available() or "cpu" in subject.devices:
            status |= _run_one(subject, arguments)
    return status
