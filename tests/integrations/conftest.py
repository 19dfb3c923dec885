# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What several of these tests watch."""

from __future__ import annotations

import pytest

from sgl_moe_jit.moe import block
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput


@pytest.fixture
def deferred(monkeypatch):
    """Collects, per finished block, whether its rows arrived un-finalized."""
    seen, finish = [], block.finish

    def watch(routed, shared, x, **options):
        seen.append(isinstance(routed, DeferredFinalizeOutput))
        return finish(routed, shared, x, **options)

    monkeypatch.setattr(block, "finish", watch)
    return seen
