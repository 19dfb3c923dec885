# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every report in field_reports.txt has a test, and every mark names a report listed there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
LISTED = [
    line.split("#")[0].strip()
    for line in (TESTS / "field_reports.txt").read_text(encoding="utf-8").splitlines()
    if line.split("#")[0].strip()
]


def marks_in(tree: ast.Module) -> dict[str, set[str]]:
    """Return the tests marked with each id: on the test, a case, the class or the module."""
    found: dict[str, set[str]] = {}

    def ids_below(nodes: list[ast.AST]) -> set[str]:
        return {
            ast.literal_eval(argument)
            for node in nodes
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func).split(".")[-1] == "field_report"
            for argument in call.args
        }

    module_marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    # Lists of cases with marks, named by a parametrize.
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }

    def visit(body: list[ast.stmt], outer: list[ast.AST], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                visit(node.body, [*outer, *node.decorator_list], f"{node.name}::")
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marks: list[ast.AST] = [*outer, *node.decorator_list]
                for decorator in node.decorator_list:
                    names = {n.id for n in ast.walk(decorator) if isinstance(n, ast.Name)}
                    marks += [constants[name] for name in names if name in constants]
                for report in ids_below(marks):
                    found.setdefault(report, set()).add(prefix + node.name)

    visit(tree.body, module_marks, "")
    return found


@pytest.fixture(scope="module")
def marked() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for report, tests in marks_in(ast.parse(path.read_text(encoding="utf-8"))).items():
            where = path.relative_to(TESTS).as_posix()
            found.setdefault(report, set()).update(f"{where}::{test}" for test in tests)
    return found


@pytest.mark.parametrize("report", LISTED)
def test_a_listed_report_has_a_test(marked, report):
    assert marked.get(report), f"no test is marked @pytest.mark.field_report({report!r})"


def test_every_mark_names_a_listed_report(marked):
    strays = {report: sorted(tests) for report, tests in marked.items() if report not in LISTED}
    assert not strays, f"add to tests/field_reports.txt: {strays}"


def test_the_list_has_no_id_twice():
    assert len(LISTED) == len(set(LISTED))


def test_marks_are_seen_wherever_they_stand():
    text = """
import pytest
pytestmark = pytest.mark.field_report("M0")
CASES = [pytest.param(1, marks=pytest.mark.field_report("M1"))]
@pytest.mark.field_report("M2")
class TestGroup:
    @pytest.mark.field_report("M3")
    def test_a(self): ...
@pytest.mark.parametrize("x", CASES)
@pytest.mark.parametrize("y", [pytest.param(1, marks=[pytest.mark.field_report("M4")])])
def test_b(x, y): ...
field_report = pytest.mark.field_report
@field_report("M5")
def test_c(): ...
@field_report("M6")
def helper(): ...
"""
    assert marks_in(ast.parse(text)) == {
        "M0": {"TestGroup::test_a", "test_b", "test_c"},
        "M1": {"test_b"},
        "M2": {"TestGroup::test_a"},
        "M3": {"TestGroup::test_a"},
        "M4": {"test_b"},
        "M5": {"test_c"},
    }
