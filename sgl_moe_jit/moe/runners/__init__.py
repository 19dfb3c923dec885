# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Runners: each computes a layer's expert rows its own way, and may hand them over un-finalized."""

from sgl_moe_jit.moe.runners import (  # each registers itself
    flashinfer_cutlass,
    flashinfer_trtllm,
    grouped_mm,
    native,
)
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
from sgl_moe_jit.moe.runners.plan import RunnerPlan, explain

__all__ = [
    "MoERunner",
    "RunnerEntry",
    "RunnerPlan",
    "Selection",
    "Support",
    "create_runner",
    "explain",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
    "grouped_mm",
    "native",
    "register_runner",
    "runner_names",
    "select_runner",
]
