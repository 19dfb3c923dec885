# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""For every test: an empty kernel cache of this session's own, a seed, and reasons for skips."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

import pytest
import torch

# Before any test module is imported, and in the environment, so that child processes share it.
# SGL_MOE_JIT_TEST_CACHE_DIR names one to use and to keep instead: on a GPU machine, filled ahead
# by `python -m sgl_moe_jit compile`, it saves minutes of compiling.
_GIVEN = os.environ.get("SGL_MOE_JIT_TEST_CACHE_DIR")
_CACHE = _GIVEN or tempfile.mkdtemp(prefix="sgl_moe_jit-tests-")
os.environ["SGL_MOE_JIT_CACHE_DIR"] = _CACHE

torch.set_num_threads(min(4, len(os.sched_getaffinity(0))))


def pytest_unconfigure():
    if not _GIVEN:
        shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_addoption(parser):
    # pytest-timeout declares this setting; without the plug-in --strict-config would refuse it.
    with contextlib.suppress(ValueError):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def pytest_collection_modifyitems(items):
    # Those that look into the compiled batches last: all others run while these are compiled.
    items.sort(key=lambda item: "builds" in item.fixturenames)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "gpu" in item.keywords and devices == 0:
            item.add_marker(
                pytest.mark.skip(
                    reason="needs a CUDA device: torch.cuda.is_available() is False; "
                    "run it with `pytest -m gpu` on a GPU machine"
                )
            )
        if "multigpu" in item.keywords and devices < 2:
            reason = f"needs two CUDA devices: torch.cuda.device_count() is {devices}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20260101)
