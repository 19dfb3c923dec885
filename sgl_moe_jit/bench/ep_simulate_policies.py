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


def _is_marked(index: Ints, marked: int, total: int) -> npt.NDArray[np.bool_]:
    """Return whether each of ``total`` places is among ``marked`` of them, spread evenly."""
    total = max(total, 1)
    return np.asarray((index + 1) * marked // total > index * marked // total)


def exact(view: View) -> Ints:
    """Fill the ranks up to one level: quotas, home rows first, each kind spread over the rows.

    Rows that leave home are dealt by halves: of those that come to a span of ranks, each half gets
    what its ranks have room for, in an even mix.
    """
    valid, source, num_ranks = view.valid, view.source, len(view.counts)
    quotas = level_quotas(view.counts, int(view.rows.sum()), view.start)
    stay = np.minimum(quotas, view.rows)
    index = np.cumsum(valid) - 1
    own, kept = int(view.rows[source]), int(stay[source])
    stays = _is_marked(index, kept, own)
    place = int((view.rows - stay)[:source].sum()) + index - index * kept // max(own, 1)
    below = np.concatenate([[0], np.cumsum(quotas - stay)])
    size = 1 << (num_ranks - 1).bit_length()
    low = np.zeros_like(place)
    total = np.full_like(place, below[-1])
    while size > 1:
        size //= 2
        middle = np.minimum(low + size, num_ranks)
        left = below[middle] - below[low]
        to_left = place * left // np.maximum(total, 1)
        goes_left = (place + 1) * left // np.maximum(total, 1) > to_left
        place = np.where(goes_left, to_left, place - to_left)
        total = np.where(goes_left, left, total - left)
        low = np.where(goes_left, low, middle)
    return np.where(valid, np.where(stays, source, np.minimum(low, num_ranks - 1)), -1)


CHUNK_ROWS = 256
_PARTS = 256  # of a row, in which loads are counted
_MOST = 1 << 22


def exact_restricted(view: View) -> Ints:
    """Give each token to the least loaded of the ranks it visits: greedily, 256 rows at a time.

    A chunk of n of all M rows in sight stands for all of them: it sees n / M of the loads. Its
    steps are then coarse, so each rank starts up to one row higher, in each chunk differently, and
    the chunks together round evenly. Rows with one choice come first. Equal ranks: in an order
    that starts at another one for each source and chunk.
    """
    num_ranks, total = len(view.counts), max(int(view.rows.sum()), 1)
    above = view.counts - view.counts.min()
    rows = [sorted({*row} - {-1}) for row in view.hits.tolist()]
    chosen = np.full(len(rows), -1, dtype=np.int64)
    for chunk, first in enumerate(range(0, len(rows), CHUNK_ROWS)):
        live = [i for i in range(first, min(first + CHUNK_ROWS, len(rows))) if rows[i]]
        height = np.minimum(above * (len(live) * _PARTS) // total, _MOST)
        if len(live) != total:
            salt = (view.source * 4096 + chunk) * 0x85EBCA6B
            height += (np.arange(num_ranks) * 0x9E3779B9 + salt & 0xFFFFFFFF) >> 24
        turn = (np.arange(num_ranks) - view.source - chunk) % num_ranks
        key = (height * num_ranks + turn).tolist()  # of equal heights the lower turn
        for i in (*(i for i in live if len(rows[i]) == 1), *(i for i in live if len(rows[i]) > 1)):
            best = min(rows[i], key=key.__getitem__)
            key[best] += _PARTS * num_ranks
            chosen[i] = best
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
