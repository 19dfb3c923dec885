# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``bench`` as typed: read and written. No torch: every ``--help`` comes by."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def names(text: str) -> tuple[str, ...]:
    """Return the items that are not empty, at least one.

    Raises:
        ArgumentTypeError: there is none.
    """
    found = tuple(part for part in text.split(",") if part)
    if not found:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return found


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


def typed(arguments: argparse.Namespace, among: Iterable[str]) -> list[str]:
    """Return those of the arguments that were given, as words of a command line.

    Not given are None and False; 0 is a number given, though it equals False.
    """
    words = []
    for name in among:
        value = getattr(arguments, name, None)
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


# What a number of a result file must not depend on, in place of this machine's paths.
_PLACEHOLDERS = {"json": "FILE", "plot": "DIR"}


def typed_outputs(arguments: argparse.Namespace) -> list[str]:
    """Return where the results go, as words of a command line, without this machine's paths."""
    return [
        word
        for name, placeholder in _PLACEHOLDERS.items()
        if getattr(arguments, name, None) is not None
        for word in (f"--{name}", placeholder)
    ]
