# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Runners: each computes a layer's expert rows its own way, and may hand them over un-finalized."""

from sgl_moe_jit.moe.runners import grouped_mm, native  # each registers itself
from sgl_moe_jit.moe.runners.base import (
    MoERunner,
    RunnerEntry,
    Selection,
    Support,
    create_runner,
    register_runner,
    runner_names,
    select_runner,
)

__all__ = [
    "MoERunner",
    "RunnerEntry",
    "Selection",
    "Support",
    "create_runner",
    "grouped_mm",
    "native",
    "register_runner",
    "runner_names",
    "select_runner",
]
