# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The README says nothing that does not run: its code, its tables, its paths."""

import re
from pathlib import Path

import pytest

from sgl_moe_jit.bench import readme

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_generated_parts_are_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    want = readme.render(TEXT, Path("benchmarks/results"))
    assert want == TEXT, "run: python -m sgl_moe_jit.bench.readme README.md benchmarks/results"


def test_the_runner_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    example = next(block for block in blocks if "create_runner" in block)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["y"].shape == (scope["num_tokens"], scope["hidden"])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_file_it_names_is_there(document):
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:sgl_moe_jit|csrc|include|tests|docs)/[\w./*]+)`", text)
    named += re.findall(r"\]\(([\w./]+\.md)\)", text)
    assert named
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing
