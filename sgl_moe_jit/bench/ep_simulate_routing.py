# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routing to simulate: which experts the tokens of every source choose, and which ranks own them.

``uniform``: K distinct experts a token, all alike. ``zipf``: the i-th most popular expert is drawn
with probability proportional to ``1 / i**0.8``, popularity dealt to ids at random. ``bursty``: a
source works through runs of tokens about one topic, 64 tokens long on average, and a topic is 16
experts that are 8 times as likely. A trace gives the choices of a real model instead.

Without replicas expert e lives on rank ``e // L``. Replicas (redundant experts) are there when the
ranks do not divide the experts, as few as it takes, and in ``zipf-eplb``, which is ``zipf`` with at
least 32 of them. The most popular experts get them, each token takes one in turn, and all physical
experts go to ranks as EPLB has it: heaviest first, to the least loaded rank with a slot left. The
popularity is known exactly, so this is EPLB at its best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_moe_jit.bench.ep_arguments import ROUTINGS
from sgl_moe_jit.bench.ep_simulate_policies import Ints

ZIPF_EXPONENT = 0.8
BURST_TOKENS, BURST_EXPERTS, BURST_ODDS = 64, 16, 8.0
EPLB = "-eplb"
EPLB_REPLICAS = 32

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Placement:
    """Where the replicas of each expert live.

    Attributes:
        ranks: [num_experts, most replicas] owner rank; rows are padded with their first.
        replicas: [num_experts] how many there are.
    """

    ranks: Ints
    replicas: Ints

    def owners(self, ids: Ints) -> Ints:
        """Return the rank that computes each choice, [N, K]; -1 stays -1."""
        turn = np.arange(len(ids))[:, None] % self.replicas[ids]
        return np.where(ids < 0, -1, self.ranks[ids, turn])


def redundant_experts(routing: str, num_experts: int, num_ranks: int) -> int:
    """Return the fewest replicas that give every rank the same number of experts."""
    least = EPLB_REPLICAS if routing.endswith(EPLB) else 0
    return least + -(num_experts + least) % num_ranks


def place(popularity: npt.NDArray[np.float64], num_ranks: int, extra: int) -> Placement:
    """Place experts on ranks.

    Args:
        popularity: [num_experts] expected pairs of each.
        num_ranks: W.
        extra: Replicas; with them, W divides the experts.
    """
    num_experts = len(popularity)
    slots = (num_experts + extra) // num_ranks
    replicas = np.ones(num_experts, dtype=np.int64)
    if not extra:
        return Placement((np.arange(num_experts) // slots)[:, None], replicas)
    for _ in range(extra):
        replicas[(popularity / replicas).argmax()] += 1
    share = popularity / replicas
    owners: list[list[int]] = [[] for _ in range(num_experts)]
    ranks = [(0.0, rank, slots) for rank in range(num_ranks)]
    for expert in np.repeat(np.arange(num_experts), replicas)[
        np.argsort(-np.repeat(share, replicas), kind="stable")
    ].tolist():
        load, rank, free = heapq.heappop(ranks)
        owners[expert].append(rank)
        if free > 1:
            heapq.heappush(ranks, (load + float(share[expert]), rank, free - 1))
    width = int(replicas.max())
    table = np.array([row + row[:1] * (width - len(row)) for row in owners], dtype=np.int64)
    return Placement(table, replicas)


def _choose(odds: Floats, top_k: int, num_rows: int, rng: np.random.Generator) -> Ints:
    """Return K distinct experts a row, drawn one after the other with these odds."""
    # The first K arrivals of a race with such rates. No logarithm, whose last bit CPUs disagree on.
    arrival = rng.standard_exponential((num_rows, odds.shape[-1]), dtype=np.float32) / odds
    chosen = np.argpartition(arrival, top_k - 1, axis=1)[:, :top_k]
    return np.sort(chosen.astype(np.int64), axis=1)  # argpartition leaves their order open


def _bursts(num_rows: int, num_experts: int, rng: np.random.Generator) -> Floats:
    topic = np.cumsum(rng.random(num_rows) < 1 / BURST_TOKENS)
    odds = np.ones((int(topic[-1]) + 1, num_experts), dtype=np.float32)
    for row in odds:
        row[rng.choice(num_experts, min(BURST_EXPERTS, num_experts), replace=False)] = BURST_ODDS
    return odds[topic]


def synthetic(
    routing: str, num_experts: int, top_k: int, num_ranks: int, num_tokens: int, seed: int
) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Return the choices of one step, [W, N, K], and the expected popularity of each expert.

    The same arguments give the same choices on every machine with the same numpy.
    """
    kind = routing.removesuffix(EPLB)
    rng = np.random.default_rng([seed, num_ranks, num_experts, num_tokens, ROUTINGS.index(kind)])
    popularity: npt.NDArray[np.float64] = np.ones(num_experts)
    if kind == "zipf":
        # a generator of its own: the same experts stay popular in every step and at every size
        order = np.random.default_rng(num_experts).permutation(num_experts)
        popularity = np.array([(1.0 + rank) ** -ZIPF_EXPONENT for rank in order.tolist()])
    odds = popularity.astype(np.float32)[None]
    ids = [
        _choose(
            _bursts(num_tokens, num_experts, rng) if kind == "bursty" else odds,
            top_k,
            num_tokens,
            rng,
        )
        for _ in range(num_ranks)
    ]
    return np.stack(ids), popularity


def trace_steps(layers: Iterable[Ints], num_ranks: int, num_tokens: int) -> Iterator[Ints]:
    """Yield choices [W, N, K]: each layer's rows in order; what fills no step is dropped."""
    size = num_ranks * num_tokens
    for ids in layers:
        for first in range(0, len(ids) - size + 1, size):
            step = ids[first : first + size]
            yield step.reshape(num_ranks, num_tokens, step.shape[1]).astype(np.int64)
