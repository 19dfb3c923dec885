# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Result files as Markdown: one function a kind of file, each table with where it comes from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = "sgl_moe_jit"
_PEERS = ("sglang", "flashinfer")


def load(path: Path) -> list[Row]:
    """Return a result file's records."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def _commit(row: Row) -> str:
    sha, plus, changes = row["commit"].partition("+")
    return f"`{sha[:7]}{plus}{changes}`"


def origin(rows: Sequence[Row], path: Path, what: str = "") -> str:
    """Return device, date, commit, file and command of a table."""
    first = rows[0]
    versions = "".join(
        f", {name} {first['versions'][name]}" for name in _PEERS if name in first["versions"]
    )
    return (
        f"{first['device']}, {first['date']}, commit {_commit(first)}{versions}{what}; file "
        f"`{path.as_posix()}`, command `{first['command']}`."
    )


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = "" if row["p20_us"] is None else f" ({row['p20_us']:.2f} to {row['p80_us']:.2f})"
    return f"{row['median_us']:.2f}{spread}"


def _ratio(row: Row | None, ours: Row | None) -> str:
    if row is None or ours is None:
        return "-"
    return f"{row['median_us'] / ours['median_us']:.2f}x"


def _share(row: Row | None, ours: Row | None) -> str:
    if row is None or ours is None:
        return "-"
    return f"{row['median_us'] / ours['median_us']:.0%}"


def _shapes(rows: Sequence[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """Group the records of one shape and mode by provider, all hot ones first."""
    shapes: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["mode"] != "hot"):
        key = (row["case"], row["num_tokens"], row["mode"])
        shapes.setdefault(key, {})[row["provider"]] = row
    return shapes


@dataclass(frozen=True)
class Comparison:
    """A table of one case: our time, each peer's with its ratio, and our share of a roofline.

    Attributes:
        peers: Providers to show, where the file has them; None shows all.
        roofline: The provider that only moves the bytes, or None.
    """

    peers: tuple[str, ...] | None = None
    roofline: str | None = None

    def __call__(self, path: Path) -> str:
        """Return the Markdown of a result file's first case."""
        every = load(path)
        rows = [row for row in every if row["case"] == every[0]["case"]]
        there = list(dict.fromkeys(row["provider"] for row in rows))
        wanted = there if self.peers is None else self.peers
        peers = [name for name in wanted if name in there and name not in (OURS, self.roofline)]
        roofline = self.roofline if self.roofline in there else None
        modes = len({row["mode"] for row in rows}) > 1
        head = ["tokens", *(["buffers"] if modes else []), f"{OURS}, us"]
        for name in peers:
            head += [f"{name}, us", f"{name} / ours"]
        if roofline:
            head += [f"{roofline}, us", f"{roofline} / ours"]
        lines = []
        for (_, tokens, mode), group in _shapes(rows).items():
            ours = group.get(OURS)
            cells = [str(tokens), *([mode] if modes else []), _time(ours)]
            for name in peers:
                cells += [_time(group.get(name)), _ratio(group.get(name), ours)]
            if roofline:
                cells += [_time(group.get(roofline)), _share(group.get(roofline), ours)]
            lines.append(cells)
        first = rows[0]
        buffers = "" if modes or first["mode"] == "graph" else f", {first['mode']}"
        note = f", {first['note']}" if first["mode"] == "graph" and first.get("note") else ""
        what = f", hidden {first['hidden_dim']}, top {first['top_k']}{buffers}{note}"
        where = origin(rows, path, f"{what}, median (p20 to p80)")
        return f"{where}\n\n{_table(head, lines)}"


def ratios(path: Path, peer: str = "sglang") -> str:
    """Return a table of a peer's time over ours: a row a model, a column a size and mode."""
    rows = load(path)
    shapes = _shapes(rows)
    columns = sorted({(mode != "hot", tokens, mode) for _, tokens, mode in shapes})
    head = ["model", "hidden", "top", *(f"{tokens} {mode}" for _, tokens, mode in columns)]
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        first = next(row for row in rows if row["case"] == case)
        cells = [case, str(first["hidden_dim"]), str(first["top_k"])]
        for _, tokens, mode in columns:
            group = shapes.get((case, tokens, mode), {})
            cells.append(_ratio(group.get(peer), group.get(OURS)))
        lines.append(cells)
    where = origin(rows, path, f", {peer}'s time over ours by tokens and buffers, medians")
    return f"{where}\n\n{_table(head, lines)}"


def _by_layer(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    layers: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        layers.setdefault((row["case"], row["num_tokens"]), {})[row["provider"]] = row
    return layers


def _notes(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{row['case']}: {row['note']}" for row in rows))


def _first_case(rows: Sequence[Row], first_only: bool) -> Sequence[Row]:
    return [row for row in rows if row["case"] == rows[0]["case"]] if first_only else rows


def layer_table(path: Path, *, first_only: bool = False) -> str:
    """Return a whole layer's times: deferred or not, on one stream and two, and others' times."""
    rows = _first_case(load(path), first_only)
    ways = ("two streams", "two streams, not deferred", "one stream", "one stream, not deferred")
    head = ["model", "tokens", f"{OURS}, us", *(f"{way}, us" for way in ways)]
    head += ["GEMMs alone, us", "ours / GEMMs", "transformers, us", "transformers / ours"]
    lines = []
    for (case, tokens), group in _by_layer(rows).items():
        ours, gemms, stock = (group.get(name) for name in (OURS, "GEMMs alone", "transformers"))
        cells = [case, str(tokens), _time(ours)]
        cells += [_time(group.get(f"{OURS}, {way}")) for way in ways]
        cells += [_time(gemms), _ratio(ours, gemms), _time(stock), _ratio(stock, ours)]
        lines.append(cells)
    where = origin(rows, path, f", bfloat16, median (p20 to p80). {_notes(rows)}")
    return f"{where}\n\n{_table(head, lines)}"


def memory_table(path: Path, *, first_only: bool = False) -> str:
    """Return what a layer allocates at most, in MiB, and the shares of others' that ours is."""
    rows = _first_case(load(path), first_only)
    others = ("shared first", "rows kept")
    head = ["model", "tokens", f"{OURS}, MiB", *(f"{name}, MiB" for name in others)]
    head += ["saved, of the shared output", "transformers, MiB", "ours / transformers"]
    lines = []
    for (case, tokens), group in _by_layer(rows).items():
        peaks = {name: row["peak_bytes"] for name, row in group.items()}
        ours, first = peaks[OURS], peaks.get(f"{OURS}, shared first")
        output = tokens * group[OURS]["hidden_dim"] * 2
        cells = [case, str(tokens), f"{ours / 2**20:.0f}"]
        for name in others:
            peak = peaks.get(f"{OURS}, {name}")
            cells.append("-" if peak is None else f"{peak / 2**20:.0f}")
        cells.append("-" if first is None else f"{(first - ours) / output:.2f}")
        stock = peaks.get("transformers")
        cells += ["-", "-"] if stock is None else [f"{stock / 2**20:.0f}", f"{ours / stock:.2f}"]
        lines.append(cells)
    where = origin(rows, path, f", bfloat16, `max_memory_allocated`. {_notes(rows)}")
    return f"{where}\n\n{_table(head, lines)}"


def ep_table(path: Path) -> str:
    """Return a block over ranks, a row a way: its time, and how many rows each rank computed."""
    rows = load(path)
    head = ["model", "ranks", "over", "tokens a rank", "way", "us", "rows of each rank"]
    lines = []
    for row in rows:
        cells = [row["case"], str(row["ranks"]), row["backend"], str(row["num_tokens"])]
        loads = ", ".join(map(str, row["rows_per_rank"]))
        lines.append([*cells, row["provider"], _time(row), loads])
    skew = ", ".join(f"{skew:g}" for skew in dict.fromkeys(row["skew"] for row in rows))
    where = origin(rows, path, f", skew {skew}, slowest rank, median (p20 to p80)")
    return f"{where}\n\n{_table(head, lines)}"


def host_table(path: Path) -> str:
    """Return the host's share of one eager call, a row a way to call."""
    rows = load(path)
    first = rows[0]
    what = f", {first['num_tokens']} tokens of {first['hidden_dim']}, top {first['top_k']}"
    lines = [[row["provider"], _time(row)] for row in rows]
    where = origin(rows, path, f"{what}, median (p20 to p80)")
    return f"{where}\n\n{_table(('one eager call', 'us of the host'), lines)}"


def _seconds(row: Row) -> str:
    median, low, high = (row[key] / 1e6 for key in ("median_us", "p20_us", "p80_us"))
    return f"{median:.3f} s (p20 {low:.3f}, p80 {high:.3f})"


def jit_sentence(path: Path) -> str:
    """Return the two JIT figures of a result file as one sentence."""
    rows = {row["mode"]: row for row in load(path)}
    built, loaded = (_seconds(rows[mode]) for mode in ("cold", "warm"))
    where = origin([rows["cold"]], path)
    return f"First build {built}, load in the next process {loaded}, imports not counted: {where}"


# Result file, by stem -> its Markdown.
FIGURES: dict[str, Callable[[Path], str]] = {
    "finalize": Comparison(("sglang", "flashinfer+add", "torch.compile"), "stream"),
    "finalize_models": ratios,
    "norm": Comparison(roofline="stream"),
    "permute": Comparison(),
    "waterfill": Comparison(),
    "route": Comparison(),
    "layer": layer_table,
    "memory": memory_table,
    "ep": ep_table,
    "host": host_table,
    "cpu": Comparison(roofline="copy"),
    "jit": jit_sentence,
}
# Where the README has less than the results' own page: one model's layer.
SHORT: dict[str, Callable[[Path], str]] = {
    **FIGURES,
    "layer": functools.partial(layer_table, first_only=True),
    "memory": functools.partial(memory_table, first_only=True),
}
