# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator's tables in a document, from committed result files.

``python -m sgl_moe_jit.bench.ep_simulate_docs docs/expert_parallel.md benchmarks/results`` writes
them between their markers, which name the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

RANKS = (8, 32, 144, 320)  # of the file's; the rest is in the file and in the figure
_LOADS = (
    *("home", "sampled", "sampled, dynamic", "exact", "exact, dynamic"),
    *("restricted", "restricted, dynamic"),
)
_COPIES = ("sampled, dynamic", "exact", "exact, dynamic")


def _scenarios(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Return the records of each scenario by provider, with few of the ranks and experts."""
    first = rows[0]["num_experts"]
    grouped: dict[tuple[Any, ...], dict[str, Row]] = {}
    several = len({row["num_ranks"] for row in rows}) > len(RANKS)
    for row in rows:
        if row["num_experts"] == first and (not several or row["num_ranks"] in RANKS):
            key = (row["case"], row["num_ranks"], row["num_tokens"])
            grouped.setdefault(key, {})[row["provider"]] = row
    return list(grouped.values())


def table(path: Path) -> str:
    """Return a result file's table, with where it comes from.

    Loads are the mean over steps of the fullest rank's rows over the level; copies are a token's.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    heads = [
        *("routing", "ranks", "experts", "tokens a rank", "routed alone"),
        *_LOADS,
        *(f"copies: {name}" for name in _COPIES),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for by in _scenarios(rows):
        home = by["home"]
        cells = [
            home["case"],
            home["num_ranks"],
            f"{home['num_experts']} + {home['num_redundant']}",
            home["num_tokens"],
            f"{home['routed_over_level']:.3f}",
            *(f"{by[name]['load_over_level']:.3f}" for name in _LOADS),
            *(f"{by[name]['extra_copies']:.2f}" for name in _COPIES),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    first = rows[0]
    name = f"benchmarks/results/{path.name}"
    lines += [
        "",
        f"`{first['command']}`, {first['date']}, commit `{first['commit'][:7]}`; "
        f"top {first['top_k']}, mean of {first['steps']} steps; file `{name}`.",
    ]
    return "\n".join(lines)


def render(text: str, results: Path) -> str:
    """Return the document with every table renewed.

    Raises:
        ValueError: a marker has no end.
        OSError: it names no file.
    """

    def part(match: re.Match[str]) -> str:
        begin, end = f"<!-- {match[1]}:begin -->\n", f"<!-- {match[1]}:end -->"
        if not match[0].endswith(end):
            raise ValueError(f"expected the marker {end} after {begin.strip()}")
        return f"{begin}{table(results / f'{match[1]}.json')}\n{end}"

    return re.sub(r"<!-- (\w+):begin -->\n(?:.*?<!-- \1:end -->)?", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m sgl_moe_jit.bench.ep_simulate_docs DOCUMENT.md RESULTS")
    document = Path(sys.argv[1])
    document.write_text(
        render(document.read_text(encoding="utf-8"), Path(sys.argv[2])), encoding="utf-8"
    )
