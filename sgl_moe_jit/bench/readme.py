# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The README's generated parts: the table of variables, and figures from committed result files.

``python -m sgl_moe_jit.bench.readme README.md benchmarks/results`` writes them in their markers,
and all of the figures with their plots into ``benchmarks/results/README.md``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sgl_moe_jit import env
from sgl_moe_jit.bench.figures import FIGURES, SHORT

COMMAND = "python -m sgl_moe_jit.bench.readme README.md benchmarks/results"
# Of a result file's figures: what the README says above its own table, when the file is there.
_TITLES = {
    "finalize": "Finalize with the shared add",
    "finalize_models": "Finalize with the shared add, other models",
    "norm": "Finalize, shared add, residual add and RMSNorm",
    "permute": "Permutation into expert order",
    "waterfill": "Top-k ids expanded for dispatch, shared experts where there is room",
    "route": "Experts and weights from router logits",
    "layer": "A whole MoE layer of one rank, in a CUDA graph",
    "memory": "What a whole MoE layer allocates at most",
    "ep": "A block over ranks, shared experts in the dispatch or beside it",
    "host": "The host's time of one eager call",
    "cpu": "Finalize with the shared add on a CPU",
    "jit": "Build and load",
}


def variables_table() -> str:
    """Return one Markdown row for each environment variable."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in env.all_variables():
        default = variable.default
        shown = "-" if default is None else int(default) if isinstance(default, bool) else default
        lines.append(f"| `{variable.name}` | {shown} | {variable.doc} |")
    return "\n".join(lines)


def render(text: str, results: Path) -> str:
    """Return the README with every generated part renewed.

    A marker stands for the result file of its name and stays empty without it.

    Raises:
        ValueError: a marker has no end, or there is nothing of its name.
    """

    def part(match: re.Match[str]) -> str:
        name = match[1]
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if not match[0].endswith(end):
            raise ValueError(f"README: expected the marker {end} after {begin.strip()}")
        if name == "variables":
            return f"{begin}{variables_table()}\n{end}"
        if name not in FIGURES:
            raise ValueError(f"README: expected a marker of {', '.join(FIGURES)}, got {name!r}")
        path = results / f"{name}.json"
        if not path.is_file():
            return begin + end
        title = "" if name == "jit" else f"{_TITLES[name]}. "
        return f"{begin}{title}{SHORT[name](path)}\n{end}"

    return re.sub(r"<!-- (\w+):begin -->\n(?:.*?<!-- \1:end -->)?", part, text, flags=re.DOTALL)


def all_figures(results: Path) -> str:
    """Return every result file's table and plots as one document for the results' folder."""
    lines = [
        "# Results",
        "",
        f"Written by `{COMMAND}`; do not edit. Plots: `python -m sgl_moe_jit.bench.plot`.",
        "",
        "Hot: one set of buffers. Cold: buffers rotated past three times the L2 cache (on a CPU:",
        "four times the last-level cache). Providers take turns in one process, each checked",
        "against float64 first. `stream` and `copy` move the same bytes and compute nothing.",
    ]
    for name, figure in FIGURES.items():
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        lines += ["", f"## {_TITLES[name]}", "", figure(path)]
        for kind in ("time", "roofline", "peak"):
            if (results / f"{name}_{kind}.png").is_file():
                lines += ["", f"![{name}, {kind}]({name}_{kind}.png)"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {COMMAND}")
    readme, folder = Path(sys.argv[1]), Path(sys.argv[2])
    readme.write_text(render(readme.read_text(encoding="utf-8"), folder), encoding="utf-8")
    (folder / "README.md").write_text(all_figures(folder), encoding="utf-8")
