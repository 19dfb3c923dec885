# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The builds of all batches, once a session: a plug-in of the test modules that look into them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from sgl_moe_jit.jit import toolchain
from tests.ops.compile_batches import Builds
from tests.ops.compile_variants import all_batches

_BUILDS = pytest.StashKey[Builds]()


def pytest_collection_finish(session):
    """Start the batches of the selected tests, behind the tests that run until they are asked for.

    Tests keep one core busy, and all batches take as long as all tests: side by side they take half
    of the time.
    """
    tests = [item for item in session.items if "builds" in item.fixturenames]
    if not tests or session.config.option.collectonly or toolchain.locate_nvcc() is None:
        return
    selected = [item.callspec.params.get("batch") for item in tests if hasattr(item, "callspec")]
    builds = Builds(Path(tempfile.mkdtemp(prefix="sgl_moe_jit-batches-")))
    builds.start(batch for batch in all_batches() if batch in selected)
    session.config.stash[_BUILDS] = builds


def pytest_sessionfinish(session):
    builds = session.config.stash.get(_BUILDS, None)
    if builds is not None:
        builds.close()
        shutil.rmtree(builds.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def builds(request) -> Builds:
    """Batches under way; a test waits for those that it asks for."""
    return request.config.stash[_BUILDS]
