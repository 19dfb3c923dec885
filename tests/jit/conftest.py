# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What several tests of the JIT runtime watch."""

import pytest

from sgl_moe_jit.jit import build as building


@pytest.fixture
def cache_dir(monkeypatch, tmp_path):
    """An empty cache of the test's own: other processes use the run's."""
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch):
    """The labels built so far."""
    seen = []
    real = building.run_build

    def run_build(build, *rest):
        seen.append(build.label)
        return real(build, *rest)

    monkeypatch.setattr(building, "run_build", run_build)
    return seen
