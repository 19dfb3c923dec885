# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each waterfill policy makes of one step: loads and copies, and the records of a scenario."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sgl_moe_jit.bench.ep_simulate_optimum import restricted_optimum
from sgl_moe_jit.bench.ep_simulate_policies import (
    Ints,
    Policy,
    count_pairs,
    decide,
    exact,
    exact_restricted,
    home,
    sampled,
)

OPTIMUM = "restricted optimum"
# name -> (policy, whether each source knows everyone's counts)
POLICIES: dict[str, tuple[Policy, bool]] = {
    "home": (home, False),
    "sampled": (sampled, False),
    "sampled, dynamic": (sampled, True),
    "exact": (exact, False),
    "exact, dynamic": (exact, True),
    "restricted": (exact_restricted, False),
    "restricted, dynamic": (exact_restricted, True),
}
PROVIDERS = (*POLICIES, OPTIMUM)


@dataclass(frozen=True)
class Scenario:
    """One line of the table.

    Attributes:
        case: Name of the routing, or of the trace.
        num_ranks: W.
        num_experts: Routed experts, without replicas.
        num_redundant: Replicas.
        top_k: K.
        num_tokens: N, of each rank.
        steps: Simulated.
    """

    case: str
    num_ranks: int
    num_experts: int
    num_redundant: int
    top_k: int
    num_tokens: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """What one policy makes of one step.

    Attributes:
        max_load: Rows of the fullest rank, routed and shared.
        level: Rows of a rank if all had the same, rounded up.
        routed: Routed rows of the fullest rank, which no policy can move.
        extra_copies: Tokens sent to a rank that is neither home nor visited anyway.
        local_copies: Tokens kept at home that have no routed expert there: a copy, but no traffic.
        dispatch_copies: (token, other rank) pairs of the routed experts alone.
        tokens: That have a shared expert.
    """

    max_load: int
    level: int
    routed: int
    extra_copies: int
    local_copies: int
    dispatch_copies: int
    tokens: int

    @property
    def bound(self) -> int:
        """Load that no policy can beat."""
        return max(self.level, self.routed)


def measure(hits: Ints, chosen: Ints) -> Outcome:
    """Count what a choice of shared ranks comes to; hits [W, N, K], chosen [W, N]."""
    num_ranks = len(hits)
    load = count_pairs(hits, num_ranks)
    live = chosen >= 0
    total = load + count_pairs(chosen, num_ranks)
    source = np.arange(num_ranks)[:, None]
    visits = (hits == chosen[:, :, None]).any(axis=2)
    ordered = np.sort(np.where(hits == source[:, :, None], -1, hits), axis=2)
    first = np.concatenate([ordered[:, :, :1] >= 0, np.diff(ordered, axis=2) > 0], axis=2)
    return Outcome(
        max_load=int(total.max()),
        level=-(-int(total.sum()) // num_ranks),
        routed=int(load.max()),
        extra_copies=int((live & ~visits & (chosen != source)).sum()),
        local_copies=int((live & ~visits & (chosen == source)).sum()),
        dispatch_copies=int(first.sum()),
        tokens=int(live.sum()),
    )


def optimum(hits: Ints, start: Ints) -> Ints:
    """Return a choice among the ranks each token visits that has the least maximum load.

    Args:
        hits: [W, N, K].
        start: [W, N] such a choice, from which the search is short if it is good.
    """
    live = start >= 0
    candidates = np.where(hits >= 0, hits, start[:, :, None])[live]
    best = restricted_optimum(count_pairs(hits, len(hits)), candidates, start[live])
    chosen = np.full_like(start, -1)
    chosen[live] = best.chosen
    return chosen


def simulate(hits: Ints) -> dict[str, Outcome]:
    """Return what every policy, and the best restricted choice, make of one step."""
    outcomes = {}
    start = hits.max(axis=2)
    for name, (policy, is_global) in POLICIES.items():
        chosen = decide(policy, hits, is_global)
        outcomes[name] = measure(hits, chosen)
        if policy is exact_restricted:  # the search is short from a good start
            start = chosen
    outcomes[OPTIMUM] = measure(hits, optimum(hits, start))
    return outcomes


def summarise(scenario: Scenario, steps: Sequence[dict[str, Outcome]]) -> list[dict[str, Any]]:
    """Return one record a policy: means over the steps, and the worst of the ratios."""

    def mean(values: Iterator[float]) -> float:
        return round(float(np.mean(list(values))), 5)

    def worst(values: Iterator[float]) -> float:
        return round(max(values), 5)

    records = []
    for name in PROVIDERS:
        outcomes = [(step[name], step[OPTIMUM]) for step in steps if step[name].tokens]
        records.append(
            {
                "subject": "ep",
                "mode": "simulated",
                **asdict(scenario),
                "provider": name,
                "max_load": mean(o.max_load for o, _ in outcomes),
                "level": mean(o.level for o, _ in outcomes),
                "routed_over_level": mean(o.routed / o.level for o, _ in outcomes),
                "load_over_level": mean(o.max_load / o.level for o, _ in outcomes),
                "worst_load_over_bound": worst(o.max_load / o.bound for o, _ in outcomes),
                "worst_load_over_optimum": worst(
                    o.max_load / best.max_load for o, best in outcomes
                ),
                "extra_copies": mean(o.extra_copies / o.tokens for o, _ in outcomes),
                "local_copies": mean(o.local_copies / o.tokens for o, _ in outcomes),
                "dispatch_copies": mean(o.dispatch_copies / o.tokens for o, _ in outcomes),
            }
        )
    return records
