# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The builds of all batches, once a session: a plug-in of the test modules that look into them."""

from __future__ import annotations

import pytest

from sgl_moe_jit.jit import toolchain
from tests.ops.compile_batches import Builds
from tests.ops.compile_variants import all_batches
from tests.scratch import scratch_dir

_BUILDS = pytest.StashKey[Builds]()


def pytest_collection_finish(session):
    """Start the batches of the selected tests, behind the tests that run until they are asked for.

    Side by side with all other tests, whose processes share the batches between them.
    """
    config = session.config
    tests = [item for item in session.items if "batch_builds" in item.fixturenames]
    if not tests or config.option.collectonly or toolchain.locate_nvcc() is None:
        return
    selected = [item.callspec.params.get("batch") for item in tests if hasattr(item, "callspec")]
    worker = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    builds = Builds(scratch_dir() / "batches", worker["workercount"])
    batches = [batch for batch in all_batches() if batch in selected]
    # From another place each, so that they meet late.
    first = int(worker["workerid"].removeprefix("gw")) * len(batches) // worker["workercount"]
    builds.start(batches[first:] + batches[:first])
    config.stash[_BUILDS] = builds


def pytest_sessionfinish(session):
    builds = session.config.stash.get(_BUILDS, None)
    if builds is not None:
        builds.close()


@pytest.fixture(scope="session")
def batch_builds(request) -> Builds:
    """Batches under way; a test waits for those that it asks for."""
    return request.config.stash[_BUILDS]
