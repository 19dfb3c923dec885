# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What the command line asked a subject to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sgl_moe_jit.bench.cases import FinalizeCase

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """One run's choices.

    Attributes:
        cases: Model shapes.
        tokens: Token counts; None means the subject's own.
        modes: ``hot``, ``cold``.
        folders: Peers' sources, by peer.
        providers: Providers to time; None means all there are.
        arch: CUDA target of ``bench jit``.
    """

    cases: Sequence[FinalizeCase]
    tokens: Sequence[int] | None
    modes: Sequence[str]
    folders: Mapping[str, Path]
    providers: Sequence[str] | None
    arch: str = "9.0a"

    def choose(self, available: Mapping[str, T]) -> dict[str, T]:
        """Return the providers to time of those available, in their order.

        Raises:
            ValueError: one was asked for that there is not.
        """
        if self.providers is None:
            return dict(available)
        for name in self.providers:
            if name not in available:
                raise ValueError(
                    f"--providers: expected some of {', '.join(available)}, got {name!r}; "
                    "a peer needs its --peer NAME=DIR"
                )
        return {name: value for name, value in available.items() if name in self.providers}
