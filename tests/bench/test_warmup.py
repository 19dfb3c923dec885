# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``warmup``: everything at once, under one limit, before anybody waits for a kernel."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

import sgl_moe_jit
from sgl_moe_jit.bench import ahead
from sgl_moe_jit.errors import SglMoeJitError

pytestmark = pytest.mark.field_report("F4")


@pytest.fixture
def loads(monkeypatch):
    """Labels loaded; two at a time, or the barrier of the first two breaks."""
    seen, both, lock = [], threading.Barrier(2, timeout=20), threading.Lock()

    def load(spec):
        with lock:
            seen.append(spec.label)
            first_two = len(seen) <= 2
        if first_two:
            both.wait()
        if spec.label.startswith("bad"):
            raise SglMoeJitError(f"{spec.label} does not compile\nmore")

    monkeypatch.setenv("SGL_MOE_JIT_MAX_JOBS", "2")
    monkeypatch.setattr(ahead, "load_spec", load)
    return seen


def specs(*labels):
    return lambda target: [SimpleNamespace(label=label) for label in labels]


def test_all_modules_side_by_side(loads, monkeypatch):
    monkeypatch.setattr(ahead, "specs_for", specs("a", "b", "c"))
    assert sgl_moe_jit.warmup("9.0a") is None
    assert sorted(loads) == ["a", "b", "c"]


def test_a_failure_is_named_after_the_others_were_built(loads, monkeypatch):
    monkeypatch.setattr(ahead, "specs_for", specs("bad1", "b", "bad2"))
    with pytest.raises(SglMoeJitError) as caught:
        sgl_moe_jit.warmup("9.0a")
    assert sorted(loads) == ["b", "bad1", "bad2"]
    assert str(caught.value).splitlines()[1:] == [
        "  sm_90a: bad1: bad1 does not compile",
        "  sm_90a: bad2: bad2 does not compile",
    ]
