# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Lists on a command line, with commas between their items. No torch: every ``--help`` comes by."""

from __future__ import annotations

import argparse


def names(text: str) -> tuple[str, ...]:
    """Return the items that are not empty."""
    return tuple(part for part in text.split(",") if part)


def numbers(text: str) -> tuple[int, ...]:
    """Return integers.

    Raises:
        ArgumentTypeError: one is none; argparse puts the argument's name before it.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected integers with commas between them, got {text!r}"
        ) from None
