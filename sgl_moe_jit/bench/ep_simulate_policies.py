# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank computes each token's shared expert: the policies in plain numpy, for planning.

They are written from the rules, not from the kernels, and so also check these. W ranks, each the
source of N tokens; ``hits`` [W, N, K] is the rank that owns each routed choice, -1 where there is
none. A row without a choice is padding and gets no shared expert (-1). A policy returns the shared
rank of every token, [W, N].

With ``own`` information a source levels the pairs that it sends itself; with ``global`` it knows
the counts of all sources (one all-reduce of 2 W integers) and each decides for its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

SAMPLED_MIN_TOKENS = 64
"""Below so many rows the sampled rule keeps every token at home."""


@dataclass(frozen=True)
class View:
    """What one source knows when it places its tokens.

    Attributes:
        hits: [N, K], its own rows.
        source: Its rank.
        counts: [W] routed pairs by owner, its own or everyone's.
        rows: [W] rows by source; own information has its own alone.
        start: Rank that gets the first row of a remainder.
        is_global: Whether ``counts`` and ``rows`` are everyone's.
    """

    hits: Ints
    source: int
    counts: Ints
    rows: Ints
    start: int
    is_global: bool

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """[N]: whether a row holds a routed choice."""
        return np.asarray((self.hits >= 0).any(axis=1))


def count_pairs(hits: Ints, num_ranks: int) -> Ints:
    """Return how many (token, expert) pairs each rank owns: [W]."""
    return np.bincount(hits[hits >= 0].ravel(), minlength=num_ranks).astype(np.int64)


def level_quotas(load: Ints, num_rows: int, start: int = 0) -> Ints:
    """Return how many of ``num_rows`` go to each rank so that the maximum is least: [W].

    Ranks below the level are filled up to it; what is left goes, one row each, to ranks at the
    level in ascending ``(rank - start) mod W``.
    """
    num_ranks = len(load)
    ordered = np.sort(load)
    # rows it takes to lift the i + 1 lowest ranks to the load of the highest of them
    cost = ordered * np.arange(1, num_ranks + 1) - np.cumsum(ordered)
    lowest = int(np.searchsorted(cost, num_rows, side="right"))
    level = int((num_rows + ordered[:lowest].sum()) // lowest)
    quotas = np.maximum(level - load, 0)
    left = num_rows - int(quotas.sum())
    if left:
        ranks = (np.arange(num_ranks) + start) % num_ranks
        quotas[ranks[load[ranks] <= level][:left]] += 1
    return quotas


def home(view: View) -> Ints:
    """Keep every token's shared expert at its source."""
    return np.where(view.valid, view.source, -1)


def _hash(num_rows: int, source: int) -> Ints:
    mask = np.uint64(0xFFFFFFFF)
    salt = np.uint64(source * 0x9E3779B9 & 0xFFFFFFFF)
    rows = np.arange(num_rows, dtype=np.uint64) ^ salt
    return ((rows * np.uint64(1664525) + np.uint64(1013904223)) & mask).astype(np.int64)


def _fallback(view: View, load: Ints, row: Ints | None) -> int:
    """Return the rank when no candidate has room: home, unless another is 10/11 as loaded."""
    best, ranks = view.source, np.arange(len(load)) if row is None else row
    for rank in ranks:
        if rank >= 0 and load[rank] * 11 < load[best] * 10:
            best = int(rank)
    return best


def sampled(view: View) -> Ints:
    """Draw a rank with probability proportional to its room below the level, by a hash of the row.

    The rule that SGLang 0.5.23 has for waterfill, in integers. With global information a source's
    rows count as load at home, and when a rank is above the level already, only home and the ranks
    that the token visits are candidates.
    """
    return home(view) if len(view.hits) < SAMPLED_MIN_TOKENS else sampled_at_any_size(view)


def sampled_at_any_size(view: View) -> Ints:
    """Do as :func:`sampled` does from 64 rows on."""
    hits, source, num_ranks = view.hits, view.source, len(view.counts)
    load, pairs = view.counts, int(view.counts.sum())
    if view.is_global:
        load = load + view.rows
    target = -(-(int(load.sum()) + pairs // hits.shape[1]) // num_ranks)
    room = np.maximum(target - load, 0)
    elsewhere = np.arange(num_ranks) != source
    room = np.where(elsewhere, room * 10 // 11, room)
    draw = _hash(len(hits), source)
    if not view.is_global or int(load.max()) <= target:
        edges = np.cumsum(room)
        if edges[-1] == 0:
            return np.where(view.valid, _fallback(view, load, None), -1)
        return np.where(view.valid, np.searchsorted(edges, draw % edges[-1], side="right"), -1)
    edges = np.cumsum(np.where(_candidates(view), room, 0), axis=1)
    total = edges[:, -1]
    chosen = (edges > (draw % np.maximum(total, 1))[:, None]).argmax(axis=1)
    for row in np.flatnonzero(total == 0):
        chosen[row] = _fallback(view, load, hits[row])
    return np.where(view.valid, chosen, -1)


def _candidates(view: View) -> npt.NDArray[np.bool_]:
    """Return [N, W]: home and the ranks that a row visits anyway."""
    num_ranks = len(view.counts)
    mask = np.zeros((len(view.hits), num_ranks + 1), dtype=np.bool_)  # the last takes -1
    np.put_along_axis(mask, view.hits, True, axis=1)
    mask[:, view.source] = True
    return mask[:, :num_ranks]


def _stride(size: int) -> int:
    """Return the number nearest below the golden section of ``size`` that shares no factor."""
    step = max(1, size * 618 // 1000)
    while np.gcd(step, size) != 1:
        step -= 1
    return step


def exact(view: View) -> Ints:
    """Fill the ranks up to one level: quotas, home rows first, the rest spread by a stride."""
    valid, source = view.valid, view.source
    quotas = level_quotas(view.counts, int(view.rows.sum()), view.start)
    stay = np.minimum(quotas, view.rows)
    moved, room = view.rows - stay, quotas - stay
    total = int(moved.sum())
    index = np.cumsum(valid) - 1
    place = int(moved[:source].sum()) + index - int(stay[source])
    slot = place * _stride(total) % max(total, 1)
    elsewhere = np.searchsorted(np.cumsum(room), slot, side="right")
    return np.where(valid, np.where(index < stay[source], source, elsewhere), -1)


def exact_restricted(view: View) -> Ints:
    """Give each token, in order, to the least loaded of home and the ranks it visits.

    A source sees the counts of all, but places only its own rows, so each of them counts for as
    many as there are rows in sight for each of its own. Those steps are coarse when there are many
    sources: therefore rank r starts a fraction of a step higher, a different one for every source,
    so that the sources together round evenly. With its own counts alone the step is one row, and
    the fraction only decides ties, for each source in another way.
    """
    valid, num_ranks = view.valid, len(view.counts)
    own, total = int(valid.sum()), int(view.rows.sum())
    fraction = (view.source + np.arange(num_ranks) * _stride(num_ranks)) % num_ranks
    load = (view.counts * (own * num_ranks) + fraction * total).tolist()
    chosen = np.full(len(view.hits), -1, dtype=np.int64)
    for row, hits in enumerate(view.hits.tolist()):
        if not valid[row]:
            continue
        best = view.source
        for rank in hits:
            if rank >= 0 and load[rank] < load[best]:
                best = rank
        load[best] += total * num_ranks
        chosen[row] = best
    return chosen


Policy = Callable[[View], Ints]


def decide(policy: Policy, hits: Ints, is_global: bool) -> Ints:
    """Return the shared rank of every token of every source: [W, N].

    Args:
        policy: What each source does.
        hits: [W, N, K].
        is_global: Whether each source knows the counts of all.
    """
    num_ranks = len(hits)
    counts = np.stack([count_pairs(own, num_ranks) for own in hits])
    rows = (hits >= 0).any(axis=2).sum(axis=1)
    chosen = []
    for source, own in enumerate(hits):
        if is_global:
            view = View(own, source, counts.sum(axis=0), rows, 0, True)
        else:
            alone = np.where(np.arange(num_ranks) == source, rows, 0)
            view = View(own, source, counts[source], alone, source, False)
        chosen.append(policy(view))
    return np.stack(chosen)
