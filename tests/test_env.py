# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Environment variables: defaults, values, and nonsense refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sgl_moe_jit import env

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (env.PDL, "0", False),
        (env.PDL, " Off ", False),
        (env.PDL, "", True),  # empty counts as unset
        (env.CHECK_INDICES, "YES", True),
        (env.MAX_JOBS, "3", 3),
        (env.CPU_ISA, "AVX2", "avx2"),
        (env.CACHE_DIR, "/some/where", Path("/some/where")),
        (env.CUDA_ARCH, "9.0a", "9.0a"),
    ],
)
def test_values(monkeypatch, variable, text, value):
    monkeypatch.setenv(variable.name, text)
    assert variable.get() == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        (env.PDL, "maybe", "one of 1/0, true/false"),
        (env.MAX_JOBS, "0", "an integer >= 1"),
        (env.MAX_JOBS, "two", "an integer >= 1"),
        (env.CPU_ISA, "sse", "one of auto, portable, avx2, avx512"),
    ],
)
def test_nonsense_is_refused_by_name(monkeypatch, variable, text, expected):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=expected) as info:
        variable.get()
    assert variable.name in str(info.value)
    assert repr(text) in str(info.value)


def test_a_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv(env.CACHE_DIR.name, "~/kernels")
    assert env.CACHE_DIR.get() == Path("/home/someone/kernels")


def test_a_change_is_seen_by_the_next_launch(monkeypatch):
    for text, value in (("0", False), ("1", True), ("off", False), ("", True), ("0", False)):
        monkeypatch.setenv(env.PDL.name, text)
        assert env.launch_flags() == env.launch_flags() == env.FLAG_PDL * value + env.FLAG_VECTOR
    monkeypatch.delenv(env.PDL.name)
    monkeypatch.setenv(env.CHECK_INDICES.name, "yes")
    monkeypatch.setenv(env.VECTOR.name, "0")
    assert env.launch_flags() == env.FLAG_PDL + env.FLAG_CHECK_INDICES
    monkeypatch.setenv(env.PDL.name, "maybe")
    for _ in range(2):
        with pytest.raises(ValueError, match="maybe"):
            env.launch_flags()


@pytest.mark.parametrize("variable", env.all_variables(), ids=lambda v: v.name)
def test_every_variable_has_our_prefix_a_default_and_one_line(monkeypatch, variable):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.name.startswith("SGL_MOE_JIT_")
    assert variable.get() == variable.default
    assert variable.doc.endswith(".")
    assert "\n" not in variable.doc


def test_no_variable_is_read_anywhere_else():
    for path in sorted((ROOT / "sgl_moe_jit").rglob("*.py")):
        if path.name != "env.py":
            text = path.read_text(encoding="utf-8")
            found = re.findall(r"""["']SGL_MOE_JIT_[A-Z]\w*""", text)
            assert not found, f"{path}: declare {found} in env.py"
