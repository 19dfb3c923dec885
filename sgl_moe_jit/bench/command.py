# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m sgl_moe_jit bench``: what its arguments mean and which subject they run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_moe_jit.bench.cases import FinalizeCase
    from sgl_moe_jit.bench.report import Record

# Sizes of decode, of a chunk, and of prefill.
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
_CPU_TOKENS = (1, 8, 64, 256)
_CACHE_BYTES = 256 << 20  # past four times the last-level cache of common hosts


def _list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _int_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _list(text))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.add_argument(
        "subject",
        nargs="?",
        default="all",
        choices=("all", "jit", "cpu", "finalize"),
        help="default: all that this machine can run",
    )
    parser.add_argument("--cases", type=_list, default=("deepseek-v3",), metavar="NAME[,NAME...]")
    parser.add_argument("--tokens", type=_int_list, metavar="T[,T...]")
    parser.add_argument("--modes", type=_list, default=("hot", "cold"), metavar="hot,cold")
    parser.add_argument("--rounds", type=int, default=25, help="samples a provider")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="sglang=DIR", help="folder of its two files"
    )
    parser.add_argument("--arch", default="9.0a", help="target of bench jit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--commit", help="of the tree that runs; default: git's")


def _finalize(arguments: argparse.Namespace) -> list[Record]:
    import torch

    from sgl_moe_jit.bench import finalize, peers

    if not torch.cuda.is_available():
        raise ValueError("bench finalize: needs a CUDA device; `bench cpu` does not")
    providers: dict[str, peers.Provider] = {"sgl_moe_jit": peers.ours}
    providers.update(peers.parse_peer(text) for text in arguments.peer)
    providers["torch"] = peers.torch_eager
    records: list[Record] = []
    for case in _cases(arguments.cases):
        for num_tokens in arguments.tokens or _TOKENS:
            for mode in finalize.modes_of(num_tokens, arguments.modes):
                records += finalize.bench_cuda(case, num_tokens, mode, providers, arguments.rounds)
                torch.cuda.empty_cache()
    return records


def _cpu(arguments: argparse.Namespace) -> list[Record]:
    from sgl_moe_jit.bench import finalize, peers

    providers: dict[str, peers.Provider] = {
        "sgl_moe_jit": peers.ours,
        "torch": peers.torch_eager,
        "torch bmm": peers.torch_bmm,
    }
    records: list[Record] = []
    for case in _cases(arguments.cases):
        for num_tokens in arguments.tokens or _CPU_TOKENS:
            records += finalize.bench_cpu(
                case, num_tokens, providers, _CACHE_BYTES, arguments.rounds
            )
    return records


def _jit(arguments: argparse.Namespace) -> list[Record]:
    from sgl_moe_jit.bench.jit import bench_jit

    return bench_jit(arguments.arch)


_SUBJECTS = {"jit": _jit, "cpu": _cpu, "finalize": _finalize}


def _cases(names: Sequence[str]) -> list[FinalizeCase]:
    from sgl_moe_jit.bench.cases import CASES

    for name in names:
        if name not in CASES:
            raise ValueError(f"--cases: expected some of {', '.join(CASES)}, got {name!r}")
    return [CASES[name] for name in names]


def run(arguments: argparse.Namespace) -> int:
    """Run the subjects, print their tables, and write their records."""
    import torch

    from sgl_moe_jit.bench import report

    subjects = [arguments.subject]
    if arguments.subject == "all":
        if arguments.json:
            raise ValueError("--json: expected one subject, got all; a file holds one comparison")
        subjects = ["jit", "cpu"] + ["finalize"] * torch.cuda.is_available()
    for subject in subjects:
        records = _SUBJECTS[subject](arguments)
        device = "cuda" if subject == "finalize" else "cpu"
        if subject == "jit":
            print("\n".join(f"{r.case}, {r.mode}: {r.timing.text_ms()}" for r in records))
        else:
            print(report.table(records, report.peak_bytes_per_s(device)))
        if arguments.json:
            stamp = report.make_stamp(device, arguments.commit)
            report.write_json(records, stamp, arguments.json)
    return 0
