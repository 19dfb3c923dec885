# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The least maximum load when every token's shared expert stays where the token goes anyway.

A bipartite flow: each token sends one row to one of its candidate ranks, each rank takes
``level - routed load``. Rather than over tokens the search runs over ranks: a rank reaches another
when one of the tokens placed on it may move there. Rows move along such paths from the ranks at the
maximum until one of them reaches nobody with room; then no assignment is lower, and the ranks it
reaches prove it (:attr:`Optimum.tight`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sgl_moe_jit.bench.ep_simulate_policies import Ints


@dataclass(frozen=True)
class Optimum:
    """An assignment that no other beats.

    Attributes:
        max_load: Largest number of rows on a rank, routed and shared.
        chosen: [T] rank of each token's shared expert.
        tight: Ranks that hold ``max_load`` on average, rounded up, and whose shared rows cannot
            leave them: the proof that ``max_load`` is least. One rank when its routed rows alone
            make the maximum, all ranks when the level does.
    """

    max_load: int
    chosen: Ints
    tight: Ints


class _Placement:
    """Where the tokens are, and how many on one rank could move to another."""

    def __init__(self, load: Ints, candidates: Ints, chosen: Ints) -> None:
        num_ranks = len(load)
        self.candidates, self.chosen = candidates, chosen.copy()
        self.load = load + np.bincount(chosen, minlength=num_ranks)
        self.movable = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        sources = np.repeat(chosen, candidates.shape[1])
        np.add.at(self.movable, (sources, candidates.ravel()), 1)
        order = np.argsort(chosen, kind="stable")
        bounds = np.searchsorted(chosen[order], np.arange(num_ranks + 1))
        self.tokens = [set(order[a:b].tolist()) for a, b in pairwise(bounds)]

    def _move(self, origin: int, target: int) -> None:
        ids = np.fromiter(self.tokens[origin], dtype=np.int64)
        token = int(ids[(self.candidates[ids] == target).any(axis=1).argmax()])
        np.add.at(self.movable[origin], self.candidates[token], -1)
        np.add.at(self.movable[target], self.candidates[token], 1)
        self.tokens[origin].remove(token)
        self.tokens[target].add(token)
        self.chosen[token] = target

    def relieve(self, rank: int, level: int) -> Ints | None:
        """Move one row off ``rank`` to a rank below ``level``, or return all ranks it reaches."""
        came_from = {rank: rank}
        queue = deque([rank])
        while queue:
            here = queue.popleft()
            for there in np.flatnonzero(self.movable[here]).tolist():
                if there in came_from:
                    continue
                came_from[there] = here
                if self.load[there] < level:
                    self.load[there] += 1
                    self.load[rank] -= 1
                    while there != rank:
                        self._move(came_from[there], there)
                        there = came_from[there]
                    return None
                queue.append(there)
        return np.array(sorted(came_from))


def restricted_optimum(load: Ints, candidates: Ints, chosen: Ints) -> Optimum:
    """Return the least maximum load over all choices of one candidate a token.

    Exact at any size: maximum flow by augmenting paths, one level at a time downwards. Fast from a
    good start.

    Args:
        load: [W] routed rows.
        candidates: [T, C] ranks a token may use; repeat one to fill up.
        chosen: [T] where to start, each one of the token's candidates.
    """
    num_ranks = len(load)
    place = _Placement(load, candidates, chosen)
    routed, level = int(load.max()), -(-int(load.sum() + len(chosen)) // num_ranks)
    while True:
        top = int(place.load.max())
        if top <= routed:
            return Optimum(top, place.chosen, np.array([int(load.argmax())]))
        if top <= level:
            return Optimum(top, place.chosen, np.arange(num_ranks))
        for rank in np.flatnonzero(place.load == top).tolist():
            tight = place.relieve(rank, top - 1)
            if tight is not None:
                return Optimum(top, place.chosen, tight)
