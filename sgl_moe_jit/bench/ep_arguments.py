# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``bench ep``, both of its ways: processes that really dispatch, and ``--simulate``.

No torch and no numpy here: every ``--help`` comes by.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_moe_jit.bench.argument_types import names, numbers, typed

# Beside those that every bench has; each is None, or False, unless given.
PROCESSES = (
    "device",
    "backend",
    "skew",
    "enable_waterfill",
    "waterfill_mode",
    "dynamic",
    "exchange_choices",
    "fixed_size",
)
WATERFILL_MODES = ("exact", "exact_restricted", "sampled")
SIMULATOR = ("experts", "top_k", "routing", "steps", "seed", "trace")
BOTH = ("simulate", "ranks")
NAMES = (*BOTH, *PROCESSES, *SIMULATOR)
ROUTINGS = ("uniform", "zipf", "zipf-eplb", "bursty")
"""What ``ep_simulate_routing`` describes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only ``bench ep`` takes."""
    group = parser.add_argument_group("bench ep")
    group.add_argument(
        "--ranks",
        type=numbers,
        metavar="W[,W...]",
        help="default: 2,4; under torchrun as many; with --simulate 8 to 320",
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    group.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="default: nccl with a GPU a rank, else gloo through the host",
    )
    group.add_argument(
        "--enable-waterfill", action="store_true", help="also waterfill: its time and its loads"
    )
    group.add_argument("--waterfill-mode", choices=WATERFILL_MODES, help="default: exact")
    group.add_argument(
        "--dynamic", action="store_true", help="waterfill by the counts of all ranks"
    )
    group.add_argument(
        "--exchange-choices",
        action="store_true",
        help="waterfill, dynamic and exact_restricted, by the choices of all ranks",
    )
    group.add_argument(
        "--fixed-size", action="store_true", help="also time dispatch without a host wait"
    )
    group.add_argument(
        "--skew",
        type=float,
        metavar="S",
        help="expert e is as popular as (e + 1) ** -S; default: 0.3",
    )
    group.add_argument(
        "--simulate", action="store_true", help="loads by calculation, for any number of ranks"
    )
    group.add_argument("--experts", type=numbers, metavar="E[,E...]", help="with --simulate")
    group.add_argument("--top-k", type=int, metavar="K", help="with --simulate")
    group.add_argument(
        "--routing",
        type=names,
        metavar=",".join(ROUTINGS),
        help="with --simulate",
    )
    group.add_argument("--steps", type=int, metavar="N", help="with --simulate: of each scenario")
    group.add_argument("--seed", type=int, metavar="N", help="with --simulate")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="with --simulate: recorded routing, .npz"
    )


def refuse(arguments: argparse.Namespace, among: tuple[str, ...], where: str) -> None:
    """Refuse arguments that would be ignored.

    Raises:
        ValueError: names the first one.
    """
    for option in typed(arguments, among)[:1]:
        raise ValueError(f"{option}: means nothing to {where}; leave it out")
