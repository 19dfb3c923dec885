# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The documents say nothing that does not run: their code, the files and names they mention."""

import json
import re
from pathlib import Path

import pytest

from sgl_moe_jit import env

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["docs/deferral.md", "docs/expert_parallel.md", "docs/integration.md"]
EXAMPLES = [
    pytest.param(name, number, block, id=f"{name}-{number}")
    for name in DOCUMENTS
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.mark.parametrize(("name", "number", "code"), EXAMPLES)
def test_an_example_runs(name, number, code, capsys):
    exec(compile(code, f"{name}, example {number}", "exec"), {"__name__": "example"})


def test_the_engine_example_is_complete_and_short():
    guide = (block.values[2] for block in EXAMPLES if block.values[0] == "docs/integration.md")
    (code,) = (code for code in guide if "SharedExpertMoEBlock(" in code)
    assert len(code.splitlines()) <= 70


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_variable_it_names_is_there(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:sgl_moe_jit|csrc|include|tests|docs|benchmarks)/[\w./*]+)`", text)
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    linked = re.findall(r"\]\(([\w./]+)\)", text)
    missing += [name for name in linked if not ((ROOT / document).parent / name).is_file()]
    assert not missing
    known = {variable.name for variable in env.all_variables()}
    assert set(re.findall(r"SGL_MOE_JIT_[A-Z_]+", text)) <= known


def test_the_table_of_refusals_names_every_check():
    from tests.moe.test_block_gates import FACTS, make_plan

    text = (ROOT / "docs/deferral.md").read_text(encoding="utf-8")
    section = text.partition("## When it does not happen")[2]
    table = re.findall(r"^\| ([a-z_ ]+) \|", section, re.MULTILINE)
    checks = [check.name for check in make_plan(FACTS).deferral_checks]
    assert table == ["check", *checks, "memory"]


def test_the_simulators_tables_are_those_of_the_committed_results():
    from sgl_moe_jit.bench.ep_simulate_docs import render

    text = (ROOT / "docs/expert_parallel.md").read_text(encoding="utf-8")
    assert text.count(":begin -->") == 3
    assert render(text, ROOT / "benchmarks/results") == text


def test_what_deferral_saves_is_what_the_results_say():
    rows = json.loads((ROOT / "benchmarks/results/layer.json").read_text(encoding="utf-8"))
    took = {(r["case"], r["num_tokens"], r["provider"]): r["median_us"] for r in rows}

    def cell(case, tokens, streams):
        deferred = f"sgl_moe_jit, {streams}"
        without = took[case, tokens, f"{deferred}, not deferred"]
        saved = without - took[case, tokens, deferred]
        return f"{saved:.1f} ({100 * saved / without:.1f} %)"

    text = (ROOT / "docs/deferral.md").read_text(encoding="utf-8")
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        cells = [
            cell(case, tokens, streams)
            for case in ("deepseek-v3", "kimi-k2", "glm-4.5")
            for streams in ("two streams", "one stream")
        ]
        assert f"| {tokens} | {' | '.join(cells)} |" in text
