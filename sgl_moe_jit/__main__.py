# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``python -m sgl_moe_jit``."""

from __future__ import annotations

import sys

from sgl_moe_jit.cli import main

if __name__ == "__main__":
    sys.exit(main())
