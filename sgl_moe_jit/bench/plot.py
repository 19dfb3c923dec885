# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Figures of a result file: time over tokens, and the share of the roofline over tokens.

``python -m sgl_moe_jit.bench.plot benchmarks/results/finalize.json DIR`` draws them from a file;
``bench ... --plot DIR`` as it is measured.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_moe_jit.bench.report import share_of_peak

Row = dict[str, Any]
Value = Callable[[Row], float | None]

# A provider that only moves the op's bytes is the practical roofline of its subject.
ROOFLINE = {"finalize": "stream", "norm": "stream", "cpu": "copy"}
# Okabe and Ito's colours, which colour-blind readers can tell apart; ours is always the first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_OURS = "sgl_moe_jit"
_COLUMNS = 4
_DPI = 90
_PALETTE = 128  # colours of a PNG, so that a grid of figures stays below 150 KB
_MODULE = "sgl_moe_jit.bench.plot"


def require_matplotlib() -> None:
    """Raise ImportError with the remedy when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib. Install it with: pip install 'sgl-moe-jit[bench]'"
        ) from error


def time_us(row: Row) -> float | None:
    """Return a row's median, or None where memory was measured."""
    return row.get("median_us")


def peak_mib(row: Row) -> float | None:
    """Return a row's peak of allocated memory, or None where time was measured."""
    peak = row.get("peak_bytes")
    return None if peak is None else peak / 2**20


def share_of(rows: Sequence[Row]) -> tuple[str, Value]:
    """Return what the roofline of these rows is, and each row's share of it.

    The time of the provider that only moves bytes, over the row's; without one, the row's bytes a
    second over the datasheet's.
    """
    name = ROOFLINE.get(rows[0]["subject"])
    key = ("case", "num_tokens", "mode")
    floors = {
        tuple(row[k] for k in key): row["median_us"] for row in rows if row["provider"] == name
    }
    if not floors:
        return "share of the datasheet's bandwidth", lambda row: share_of_peak(
            row["bytes"], row["median_us"], row["device"]
        )

    def share(row: Row) -> float | None:
        floor = floors.get(tuple(row[k] for k in key))
        return None if floor is None else floor / row["median_us"]

    return f"share of `{name}`, which only moves the bytes", share


def providers_of(rows: Sequence[Row]) -> list[str]:
    """Return the providers in the order of the file, ours first."""
    return sorted(dict.fromkeys(row["provider"] for row in rows), key=lambda name: name != _OURS)


def _panel(axes: Any, rows: Sequence[Row], names: Sequence[str], value: Value) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        for i, name in enumerate(names):
            points = sorted(
                (row["num_tokens"], y)
                for row in rows
                if row["provider"] == name and row["mode"] == mode
                for y in (value(row),)
                if y is not None
            )
            if not points:
                continue
            several = len({row["mode"] for row in rows}) > 1
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                color=_COLOURS[i % len(_COLOURS)],
                marker=_MARKERS[i % len(_MARKERS)],
                markersize=4,
                linewidth=2.4 if name == _OURS else 1.2,
                linestyle="--" if several and mode == "hot" else "-",
                zorder=3 if name == _OURS else 2,
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xlabel("tokens")


def save_png(figure: Any, path: Path) -> None:
    """Write a figure with few colours, making its folder."""
    from PIL import Image

    image = io.BytesIO()
    figure.savefig(image, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(image).convert("RGB").quantize(_PALETTE).save(path, optimize=True)


def _figure(
    rows: Sequence[Row], value: Value, label: str, logarithmic: bool, path: Path
) -> Path | None:
    from matplotlib.figure import Figure

    rows = [row for row in rows if value(row) is not None]
    if not rows:
        return None
    by_case = len({row["case"] for row in rows}) > 1
    key = "case" if by_case else "mode"
    panels = list(dict.fromkeys(row[key] for row in rows))
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    width, height = (3.4, 2.8) if by_case else (5.2, 3.8)
    figure = Figure(figsize=(width * columns, height * lines + 0.6), dpi=_DPI, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=not logarithmic)
    names = providers_of(rows)
    for i, cell in enumerate(axes.flat):
        if i >= len(panels):
            cell.set_visible(False)
            continue
        _panel(cell, [row for row in rows if row[key] == panels[i]], names, value)
        cell.set_title(panels[i] if by_case else f"{rows[0]['case']}, {panels[i]}")
        if logarithmic:
            cell.set_yscale("log")
        if i % columns == 0:
            cell.set_ylabel(label)
    if not logarithmic:  # only now: a limit set earlier would keep the shared axis from growing
        axes[0][0].set_ylim(bottom=0)
    handles = {
        text: handle
        for cell in axes.flat
        for handle, text in zip(*cell.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    first = rows[0]
    dashed = "; dashed: hot" if by_case and len({row["mode"] for row in rows}) > 1 else ""
    figure.suptitle(
        f"{first['subject']}, {first['device']}, {first['date']}, {first['commit'][:7]}{dashed}",
        fontsize=10,
    )
    save_png(figure, path)
    return path


def draw(rows: Sequence[Row], folder: Path, stem: str | None = None) -> list[Path]:
    """Write ``<stem>_time.png`` and ``<stem>_roofline.png``; return those that there was data for.

    Of memory, ``<stem>_peak.png`` alone.

    Args:
        rows: One subject's, as in a result file.
        folder: Made if it is missing.
        stem: None takes the subject's name.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no records.
    """
    require_matplotlib()
    if not rows:
        raise ValueError("plot: expected at least one record, got none")
    stem = stem or rows[0]["subject"]
    if rows[0].get("peak_bytes") is not None:
        peak = folder / f"{stem}_peak.png"
        return [p for p in (_figure(rows, peak_mib, "MiB at most", True, peak),) if p is not None]
    what, share = share_of(rows)
    made = (
        _figure(rows, time_us, "microseconds", True, folder / f"{stem}_time.png"),
        _figure(rows, share, what, False, folder / f"{stem}_roofline.png"),
    )
    return [path for path in made if path is not None]


def main(argv: Sequence[str]) -> int:
    """Draw the figures of result files into a folder; returns the exit status."""
    if len(argv) < 2:
        print(f"usage: python -m {_MODULE} FILE.json [FILE.json ...] DIR", file=sys.stderr)
        return 2
    for name in argv[:-1]:
        rows = json.loads(Path(name).read_text(encoding="utf-8"))
        for path in draw(rows, Path(argv[-1]), Path(name).stem):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
