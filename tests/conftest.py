# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""For every test: an empty kernel cache of this run's own, a seed, and reasons for skips."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile

import pytest
import torch

from tests.scratch import SCRATCH_VARIABLE

# Before any test module is imported, and in the environment, so that child processes share it, and
# with them the processes of `pytest -n`.
# SGL_MOE_JIT_TEST_CACHE_DIR names a cache to use and to keep instead: on a GPU machine, filled
# ahead by `python -m sgl_moe_jit compile`, it saves minutes of compiling.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    _MADE_BY = os.getpid()
    _SCRATCH = os.environ[SCRATCH_VARIABLE] = tempfile.mkdtemp(prefix="sgl_moe_jit-tests-")
    _GIVEN = os.environ.get("SGL_MOE_JIT_TEST_CACHE_DIR")
    os.environ["SGL_MOE_JIT_CACHE_DIR"] = _GIVEN or f"{_SCRATCH}/cache"

    # Not in a hook of pytest's: none is called where a command line is refused.
    @atexit.register
    def _remove_scratch():
        if os.getpid() == _MADE_BY:  # not in a fork
            shutil.rmtree(_SCRATCH, ignore_errors=True)


_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_CORES = len(os.sched_getaffinity(0))
torch.set_num_threads(max(1, min(4, _CORES // _WORKERS)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """For ``pytest -n auto``: tests keep one core each busy; those on a GPU are not to share it."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    return 0 if torch.cuda.is_available() else min(4, _CORES)


def pytest_addoption(parser):
    # pytest-timeout declares this setting; without the plug-in --strict-config would refuse it.
    with contextlib.suppress(ValueError):
        parser.addini("timeout", "seconds a test may take; needs pytest-timeout")


def pytest_collection_modifyitems(items):
    # Those that look into the compiled batches last: all others run while these are compiled.
    items.sort(key=lambda item: "batch_builds" in item.fixturenames)
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
