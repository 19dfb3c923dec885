# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Independent jobs side by side, under one limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sgl_moe_jit import env

T = TypeVar("T")
R = TypeVar("R")


def max_jobs() -> int:
    """Return ``SGL_MOE_JIT_MAX_JOBS``, else the number of cores this process may use."""
    return env.MAX_JOBS.get() or len(os.sched_getaffinity(0))


def run_all(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``function`` on every item, at most ``max_jobs()`` at a time, and keep the order.

    Every job runs to its end; then the first failure in item order, if any, is raised.
    """
    if len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=min(len(items), max_jobs())) as pool:
        futures = [pool.submit(function, item) for item in items]
    return [future.result() for future in futures]
