# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The README says nothing that does not run: its code, its tables, its paths."""

import re
from pathlib import Path

import pytest

from sgl_moe_jit.bench import readme

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
RESULTS = Path("benchmarks/results")


def test_generated_parts_are_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert readme.render(TEXT, RESULTS) == TEXT, f"run: {readme.COMMAND}"
    written = (RESULTS / "README.md").read_text()
    assert readme.all_figures(RESULTS) == written, f"run: {readme.COMMAND}"


def test_the_runner_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    example = next(block for block in blocks if "create_runner" in block)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["y"].shape == (scope["num_tokens"], scope["hidden"])


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "benchmarks/results/README.md"]
)
def test_every_file_it_names_is_there(document):
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:sgl_moe_jit|csrc|include|tests|docs|benchmarks)/[\w./*]+)`", text)
    linked = re.findall(r"\]\(([\w./]+\.(?:md|png))\)", text)
    assert named or linked
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in linked if not ((ROOT / document).parent / name).is_file()]
    assert not missing


def test_result_files_name_no_path_of_a_machine():
    for path in (ROOT / RESULTS).glob("*.json"):
        assert not re.search(r"[\" =]/[a-z]", path.read_text()), path
