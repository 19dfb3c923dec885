# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The README's generated parts: the table of variables, and figures from committed result files.

``python -m sgl_moe_jit.bench.readme README.md benchmarks/results`` writes them in their markers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_moe_jit import env

_Row = dict[str, Any]


def variables_table() -> str:
    """Return one Markdown row for each environment variable."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for variable in env.all_variables():
        default = variable.default
        shown = "-" if default is None else int(default) if isinstance(default, bool) else default
        lines.append(f"| `{variable.name}` | {shown} | {variable.doc} |")
    return "\n".join(lines)


def _times(rows: Sequence[_Row], provider: str) -> str:
    for row in rows:
        if row["provider"] == provider:
            spread = ""
            if row["p20_us"] is not None:
                spread = f" ({row['p20_us']:.2f} to {row['p80_us']:.2f})"
            return f"{row['median_us']:.2f}{spread}"
    return "-"


def _ratio(rows: Sequence[_Row], provider: str) -> str:
    medians = {row["provider"]: row["median_us"] for row in rows}
    if provider not in medians:
        return "-"
    return f"{medians[provider] / medians['sgl_moe_jit']:.2f}x"


def figures_table(path: Path, peers: Sequence[str], case: str = "deepseek-v3") -> str:
    """Return a Markdown table of one case: our time, and each peer's with its ratio."""
    every: list[_Row] = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in every if row["case"] == case]
    first = rows[0]
    shapes: dict[tuple[str, int, str], list[_Row]] = {}
    for row in rows:
        shapes.setdefault((row["case"], row["num_tokens"], row["mode"]), []).append(row)
    head = ["tokens", "buffers", "sgl_moe_jit, us"]
    head += [f"{name}, us | {name} / ours" for name in peers]
    head_text = " | ".join(head)
    lines = [
        f"{first['device']}, {first['date']}, commit `{first['commit'][:7]}`, hidden "
        f"{first['hidden_dim']}, top {first['top_k']}, median (p20 to p80); file "
        f"`{path.as_posix()}`, command `{first['command']}`.",
        "",
        f"| {head_text} |",
        "|" + "---|" * (head_text.count("|") + 1),
    ]
    for (_, tokens, mode), group in shapes.items():
        cells = [str(tokens), mode, _times(group, "sgl_moe_jit")]
        for name in peers:
            cells += [_times(group, name), _ratio(group, name)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(row: _Row) -> str:
    median, low, high = (row[key] / 1e6 for key in ("median_us", "p20_us", "p80_us"))
    return f"{median:.3f} s (p20 {low:.3f}, p80 {high:.3f})"


def jit_lines(path: Path) -> str:
    """Return the two JIT figures of a result file as one sentence."""
    rows = {row["mode"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    cold, warm = rows["cold"], rows["warm"]
    built, loaded = (_seconds(row) for row in (cold, warm))
    return (
        f"First build {built}, load in the next process {loaded}, imports not counted: "
        f"{cold['device']}, {cold['date']}, commit `{cold['commit'][:7]}`, file "
        f"`{path.as_posix()}`, command `{cold['command']}`."
    )


def render(text: str, results: Path) -> str:
    """Return the README with every generated part renewed.

    Raises:
        ValueError: a marker is missing.
    """
    parts = {"variables": variables_table()}
    tables = {
        "finalize_shapes": ("sglang",),
        "finalize": ("sglang", "torch"),
        "cpu": ("torch", "torch bmm"),
    }
    for name, peers in tables.items():
        if (results / f"{name}.json").is_file():
            parts[name] = figures_table(results / f"{name}.json", peers)
    if (results / "jit.json").is_file():
        parts["jit"] = jit_lines(results / "jit.json")
    for name, body in parts.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise ValueError(f"README: expected the markers <!-- {name}:begin --> and {name}:end")
        begin, end = match.group(1), match.group(2)
        text = text[: match.start()] + begin + body + "\n" + end + text[match.end() :]
    return text


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(
        render(readme.read_text(encoding="utf-8"), Path(sys.argv[2])), encoding="utf-8"
    )
