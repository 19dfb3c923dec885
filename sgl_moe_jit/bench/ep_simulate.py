# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench ep --simulate``: rank loads and extra copies of each waterfill policy, past this machine.

One step: each of W ranks is the source of N tokens, each token goes to the ranks that own its K
experts, and its shared expert's row goes where the policy says. Counted are the rows of every rank
and the tokens sent to a rank that they would not have visited. What a row costs is not: the figures
say how even the work is, not how long it takes. The same arguments give the same figures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from sgl_moe_jit.bench import command, ep, ep_simulate_plot, plot, report
from sgl_moe_jit.bench.argument_types import typed, typed_outputs
from sgl_moe_jit.bench.ep_arguments import ROUTINGS
from sgl_moe_jit.bench.ep_simulate_model import OPTIMUM, POLICIES, Scenario, simulate, summarise
from sgl_moe_jit.bench.ep_simulate_policies import Ints
from sgl_moe_jit.bench.ep_simulate_routing import (
    Placement,
    place,
    redundant_experts,
    synthetic,
    trace_steps,
)
from sgl_moe_jit.ep.layout import MAX_EP_SIZE, EpLayout
from sgl_moe_jit.ep.trace import load_trace

Row = dict[str, Any]

# What --simulate takes when an argument is not given; each scenario is one combination.
DEFAULTS: dict[str, Any] = {
    "ranks": (8, 16, 32, 64, 144, 320),
    "experts": (256, 384),
    "top_k": 8,
    "routing": ROUTINGS,
    "tokens": (128,),
    "steps": 5,
    "seed": 0,
}
_TRACE_SETS = ("experts", "top_k", "routing", "steps", "seed")  # which a trace decides itself
_COLUMNS = {  # heading -> provider, in the table
    "home": "home",
    "sampl": "sampled",
    "+dyn": "sampled, dynamic",
    "exact": "exact",
    "+dyn ": "exact, dynamic",
    "restr": "restricted",
    " +dyn": "restricted, dynamic",
    "optim": OPTIMUM,
}


def settle(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with defaults filled in.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    given = {name: getattr(arguments, name, None) for name in DEFAULTS}
    if arguments.trace is not None:
        for name in _TRACE_SETS:
            if given[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')}: a trace has its own; leave it out")
        given["ranks"] = given["ranks"] or (8,)
    full = {name: DEFAULTS[name] if value is None else value for name, value in given.items()}
    for name in ("ranks", "experts", "tokens", "top_k", "steps"):
        values = full[name] if isinstance(full[name], tuple) else (full[name],)
        if not values or min(values) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {full[name]}")
    if max(full["ranks"]) > MAX_EP_SIZE:
        raise ValueError(f"--ranks: expected at most {MAX_EP_SIZE}, got {full['ranks']}")
    if full["seed"] < 0:
        raise ValueError(f"--seed: expected 0 or more, got {full['seed']}")
    if full["top_k"] > min(full["experts"]):
        raise ValueError(
            f"--top-k: expected at most {min(full['experts'])} experts, got {full['top_k']}"
        )
    for routing in full["routing"]:
        if routing not in ROUTINGS:
            raise ValueError(f"--routing: expected some of {', '.join(ROUTINGS)}, got {routing!r}")
    return argparse.Namespace(**{**vars(arguments), **full})


def command_line(arguments: argparse.Namespace) -> str:
    """Return the command with placeholders for this machine's paths."""
    words = ["python", "-m", "sgl_moe_jit", "bench", "ep", "--simulate"]
    words += typed(arguments, DEFAULTS)
    if arguments.trace is not None:
        words += ["--trace", arguments.trace.name]
    return shlex.join([*words, *typed_outputs(arguments)])


def _run_steps(case: str, placement: Placement, steps: Iterator[Ints], shape: Row) -> list[Row]:
    outcomes = [simulate(np.stack([placement.owners(own) for own in ids])) for ids in steps]
    return summarise(Scenario(case=case, steps=len(outcomes), **shape), outcomes)


def synthetic_scenarios(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the records of each combination of the settled arguments."""
    for num_experts in arguments.experts:
        for num_tokens in arguments.tokens:
            for routing in arguments.routing:
                for num_ranks in arguments.ranks:
                    yield _synthetic(arguments, routing, num_ranks, num_experts, num_tokens)


def _synthetic(
    arguments: argparse.Namespace, routing: str, num_ranks: int, num_experts: int, num_tokens: int
) -> list[Row]:
    extra = redundant_experts(routing, num_experts, num_ranks)
    EpLayout(num_experts, extra, num_ranks)  # refuses what is no layout
    shape = {
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "top_k": arguments.top_k,
        "num_tokens": num_tokens,
    }
    made = [synthetic(routing, **shape, seed=arguments.seed + i) for i in range(arguments.steps)]
    placement = place(made[0][1], num_ranks, extra)
    steps = (ids for ids, _ in made)
    return _run_steps(routing, placement, steps, {**shape, "num_redundant": extra})


def trace_scenarios(arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the records of a trace, each layer's rows dealt to the ranks in order.

    Raises:
        ValueError: no layer has rows enough for one step; and see ``load_trace``.
    """
    trace = load_trace(arguments.trace)
    layers = trace.by_layer()
    every = np.concatenate(list(layers.values()))
    popularity = np.bincount(every[every >= 0], minlength=trace.num_experts).astype(np.float64)
    most = max(map(len, layers.values()))
    for num_tokens in arguments.tokens:
        for num_ranks in arguments.ranks:
            if most < num_ranks * num_tokens:
                raise ValueError(
                    f"--tokens: expected at most {most // num_ranks} with {num_ranks} ranks, since "
                    f"no layer of the trace has more than {most} rows, got {num_tokens}"
                )
            extra = redundant_experts("trace", trace.num_experts, num_ranks)
            EpLayout(trace.num_experts, extra, num_ranks)
            yield _run_steps(
                f"trace of {trace.model}",
                place(popularity, num_ranks, extra),
                trace_steps(layers.values(), num_ranks, num_tokens),
                {
                    "num_ranks": num_ranks,
                    "num_experts": trace.num_experts,
                    "num_redundant": extra,
                    "top_k": trace.top_k,
                    "num_tokens": num_tokens,
                },
            )


def table_head() -> str:
    """Return the lines above :func:`table_line`."""
    loads = " ".join(f"{heading.strip():>6}" for heading in _COLUMNS)
    return (
        f"{'':<46} fullest rank over the level {'':<27} extra copies a token\n"
        f"{'routing':<14} {'ranks':>5} {'experts':>8} {'tokens':>6} {'routed':>8} {loads}   "
        f"{'sampl':>6} {'exact':>6} {'restr':>6}"
    )


def table_line(records: Sequence[Row]) -> str:
    """Return one scenario's line."""
    rows = {row["provider"]: row for row in records}
    first = records[0]
    experts = f"{first['num_experts']}+{first['num_redundant']}"
    loads = " ".join(f"{rows[name]['load_over_level']:>6.3f}" for name in _COLUMNS.values())
    copies = " ".join(
        f"{rows[f'{name}, dynamic']['extra_copies']:>6.3f}"
        for name in ("sampled", "exact", "restricted")
    )
    return (
        f"{first['case'][:14]:<14} {first['num_ranks']:>5} {experts:>8} {first['num_tokens']:>6} "
        f"{first['routed_over_level']:>8.3f} {loads}   {copies}"
    )


def verdict(records: Sequence[Row]) -> list[str]:
    """Return what the worst step of each policy comes to."""
    lines = ["worst step: over max(level, fullest routed)   over the restricted optimum"]
    for name in POLICIES:
        rows = [row for row in records if row["provider"] == name]
        bound = max(row["worst_load_over_bound"] for row in rows)
        best = max(row["worst_load_over_optimum"] for row in rows)
        lines.append(f"  {name:<22} {bound:>20.3f} {best:>29.3f}")
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Print the table, write the records and the plot; returns the exit status.

    Args:
        arguments: Of :func:`parse`.

    Raises:
        ValueError: an argument is wrong, or the trace is none.
        OSError: a file cannot be read or written.
    """
    full = settle(arguments)
    if arguments.plot:
        plot.require_matplotlib()  # before the work, not after it
    stamp = asdict(report.make_stamp("cpu", arguments.commit, command_line(arguments)))
    scenarios = synthetic_scenarios(full) if full.trace is None else trace_scenarios(full)
    records: list[Row] = []
    for scenario in scenarios:
        if not records:  # not before a trace was read: an error stands alone
            print(table_head())
        print(table_line(scenario), flush=True)
        records += ({**row, **stamp} for row in scenario)
        if arguments.json:  # after every scenario: a run that is cut short keeps what it has
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print("\n".join(verdict(records)))
    if arguments.plot:
        print(ep_simulate_plot.draw(records, arguments.plot / "ep_simulate.png"))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``bench ep --simulate``, from what follows these words."""
    parser = argparse.ArgumentParser(prog="python -m sgl_moe_jit.bench.ep_simulate")
    command.configure(parser)
    return parser.parse_args(["ep", "--simulate", *argv])


def main(argv: Sequence[str]) -> int:
    """Run ``bench ep --simulate``; returns the exit status.

    Raises:
        ValueError: as of :func:`run`, or an argument is not the simulator's.
    """
    return ep.run(parse(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
