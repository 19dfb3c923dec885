# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator's figure: fullest rank and extra copies over the number of ranks.

``python -m sgl_moe_jit.bench.ep_simulate_plot benchmarks/results/ep_simulate.json DIR`` draws it
from a file; ``bench ep --simulate --plot DIR`` as it is simulated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_moe_jit.bench.ep_simulate_model import POLICIES
from sgl_moe_jit.bench.plot import require_matplotlib, save_png

# Okabe and Ito's colours; a policy's dynamic form is the solid line of its colour.
_COLOURS = {"home": "#000000", "sampled": "#D55E00", "exact": "#0072B2", "restricted": "#009E73"}
_MARKERS = {"home": "s", "sampled": "D", "exact": "o", "restricted": "^"}
_DPI = 90
_ROWS = {
    "worst_load_over_bound": "fullest rank / bound, worst step",
    "extra_copies": "extra copies a token",
}


def _line(axes: Any, rows: Sequence[dict[str, Any]], name: str, field: str) -> None:
    points = sorted((row["num_ranks"], row[field]) for row in rows if row["provider"] == name)
    base = name.partition(",")[0]
    solid = name == "home" or name.endswith("dynamic")
    axes.plot(
        *zip(*points, strict=True),
        label=name,
        color=_COLOURS[base],
        marker=_MARKERS[base],
        markersize=4,
        linewidth=1.6,
        linestyle="-" if solid else ":",
    )


def draw(records: Sequence[dict[str, Any]], path: Path) -> Path:
    """Write the figure of the first number of experts and tokens among the records.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no records.
    """
    require_matplotlib()
    if not records:
        raise ValueError("plot: expected at least one record, got none")
    from matplotlib.figure import Figure

    first = records[0]
    same = ("num_experts", "num_tokens", "top_k")
    rows = [row for row in records if all(row[name] == first[name] for name in same)]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(3.4 * len(cases), 6.2), dpi=_DPI, layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    most = max(row["worst_load_over_bound"] for row in rows)
    limits = {"worst_load_over_bound": (0.99, most + 0.01), "extra_copies": (-0.03, 1.03)}
    for column, case in enumerate(cases):
        here = [row for row in rows if row["case"] == case]
        for (field, label), cell in zip(_ROWS.items(), axes[:, column], strict=True):
            for name in POLICIES:
                _line(cell, here, name, field)
            if field == "worst_load_over_bound":
                cell.set_title(case)
            cell.set_ylim(*limits[field])
            cell.set_xscale("log", base=2)
            cell.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            cell.grid(True, which="major", alpha=0.3)
            cell.set_xlabel("ranks")
            if column == 0:
                cell.set_ylabel(label)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(
        f"simulated: {first['num_experts']} experts, top {first['top_k']}, {first['num_tokens']} "
        f"tokens a rank, {first['steps']} steps, {first['commit'][:7]}; bound: what no policy "
        "beats, the larger of the mean load and the fullest routed load",
        fontsize=10,
    )
    save_png(figure, path)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m sgl_moe_jit.bench.ep_simulate_plot FILE.json DIR")
    source = Path(sys.argv[1])
    print(
        draw(
            json.loads(source.read_text(encoding="utf-8")), Path(sys.argv[2], f"{source.stem}.png")
        )
    )
