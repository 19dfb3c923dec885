# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The builds of all batches, once a session: a plug-in of the test modules that look into them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.compile_batches import Builds
from tests.ops.compile_variants import all_batches


@pytest.fixture(scope="session")
def builds(request, tmp_path_factory) -> Iterator[Builds]:
    """Starts the batches of the selected tests; a test waits for those that it asks for."""
    started = Builds(tmp_path_factory.mktemp("batches"))
    tests = [item for item in request.session.items if "builds" in item.fixturenames]
    selected = [item.callspec.params.get("batch") for item in tests if hasattr(item, "callspec")]
    started.start(batch for batch in all_batches() if batch in selected)
    yield started
    started.close()
