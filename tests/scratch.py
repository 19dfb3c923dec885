# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The folder that all processes of one test run share; ``conftest`` makes and removes it."""

from __future__ import annotations

import os
from pathlib import Path

SCRATCH_VARIABLE = "SGL_MOE_JIT_TEST_SCRATCH"


def scratch_dir() -> Path:
    """Return the folder."""
    return Path(os.environ[SCRATCH_VARIABLE])
