# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A test run leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_refused_command_line_leaves_no_folder(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--no-such-option"],
        cwd=Path(__file__).parents[1],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--no-such-option" in done.stderr
    assert list(tmp_path.iterdir()) == []
