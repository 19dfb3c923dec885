# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""House rules that a reader relies on: import order, file length, what a header may include."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sgl_moe_jit"

# Each module may import from its own layer and from those before it. The first match counts.
LAYERS = (
    ("errors", "env"),
    ("jit",),
    ("ops",),
    ("moe",),
    ("ep",),
    ("integrations",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
# Within jit, one order for the whole folder.
JIT_ORDER = (
    "memo",
    "paths",
    "arch",
    "toolchain",
    "dependencies",
    "spec",
    "parallel",
    "build",
    "manifest",
    "cache",
    "loader",
    "extension",
    "variants",
)
HARD_LIMIT = 300
SUFFIXES = {".py", ".cu", ".cuh", ".cc", ".h"}
SOURCES = sorted(
    path
    for top in ("sgl_moe_jit", "csrc", "include", "tests")
    for path in (ROOT / top).rglob("*")
    if path.suffix in SUFFIXES and "__pycache__" not in path.parts
)
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_names(path: Path) -> set[str]:
    """Return every module of this package that ``path`` imports, also inside functions."""
    package = ["sgl_moe_jit", *path.relative_to(PACKAGE).with_suffix("").parts][:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.split(".")[0] == "sgl_moe_jit"}


def layer_of(dotted: str) -> int | None:
    """Return the layer of ``sgl_moe_jit.x.y``; None for the package itself and its names."""
    parts = dotted.split(".")[1:]
    return next((i for i, names in enumerate(LAYERS) if parts and parts[0] in names), None)


def dotted_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    if path == PACKAGE / "__init__.py":
        return  # the public names, from everywhere
    own = layer_of(dotted_name(path))
    assert own is not None, f"{name_of(path)}: in no layer; add it to LAYERS"
    for name in sorted(imported_names(path)):
        other = layer_of(name)
        assert other is None or other <= own, f"{name_of(path)} imports {name}, a later layer"


@pytest.mark.parametrize("path", sorted((PACKAGE / "jit").glob("[!_]*.py")), ids=name_of)
def test_imports_inside_jit_point_back(path):
    own = JIT_ORDER.index(path.stem)
    for name in imported_names(path):
        parts = name.split(".")
        if parts[:2] == ["sgl_moe_jit", "jit"] and len(parts) > 2:
            assert parts[2] in JIT_ORDER[:own], f"{path.stem} imports {name}: not before it"


def test_the_map_in_the_docstring_of_jit_is_in_that_order():
    text = ast.get_docstring(ast.parse((PACKAGE / "jit" / "__init__.py").read_text()))
    named = [word for word in re.findall(r"``(\w+)``", text) if word in JIT_ORDER]
    assert named == list(JIT_ORDER)


def test_this_test_sees_imports_inside_functions(tmp_path, monkeypatch):
    (tmp_path / "sgl_moe_jit" / "jit").mkdir(parents=True)
    path = tmp_path / "sgl_moe_jit" / "jit" / "x.py"
    path.write_text(
        "def f():\n    from ..moe import deferred\n    import sgl_moe_jit.ops.finalize\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "sgl_moe_jit")
    assert {layer_of(name) for name in imported_names(path)} == {2, 3}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_longer_than_the_hard_limit(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= HARD_LIMIT, f"{name_of(path)}: {lines} lines; split it"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_starts_with_its_licence(path):
    comment = "#" if path.suffix == ".py" else "//"
    assert path.read_text(encoding="utf-8").startswith(
        f"{comment} SPDX-FileCopyrightText: The sgl_moe_jit authors\n"
        f"{comment} SPDX-License-Identifier: Apache-2.0\n"
    )


DEVICE_CODE = [p for p in SOURCES if p.suffix in {".cu", ".cuh"} and "tests" not in p.parts]


@pytest.mark.parametrize("path", DEVICE_CODE, ids=name_of)
def test_device_code_includes_no_framework(path):
    # Not only for order: these headers take nvcc several seconds.
    seen, queue = set(), [path]
    while queue:
        for name in re.findall(r'#\s*include\s*["<]([^">]+)[">]', queue.pop().read_text()):
            assert not re.match(r"(tvm|torch|ATen|c10|dlpack|pybind11)/", name), name
            for base in (ROOT / "include", ROOT / "csrc", path.parent):
                if (base / name).is_file() and base / name not in seen:
                    seen.add(base / name)
                    queue.append(base / name)


def test_no_path_of_a_developers_machine_is_in_the_sources():
    pattern = re.compile(r"/(?:home|Users|root|mnt)/\w")
    allowed = {"tests/test_layers.py", "tests/test_env.py"}
    for path in SOURCES:
        if name_of(path) not in allowed:
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{name_of(path)}: {found}"
