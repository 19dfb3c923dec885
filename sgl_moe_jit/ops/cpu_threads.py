# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The threads a CPU kernel runs on: those of the OpenMP runtime that torch has loaded."""

from __future__ import annotations

import ctypes
import os

import torch


def _find_openmp() -> int:
    """Return the address of ``GOMP_parallel`` in the process, 0 when there is none.

    torch loads its OpenMP runtime into the process's global scope; libgomp, LLVM's and Intel's
    runtimes all export this entry point.
    """
    try:
        entry = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return 0
    return ctypes.cast(entry, ctypes.c_void_p).value or 0


_openmp = _find_openmp()


def _forget_openmp() -> None:
    # libgomp's threads are gone in a forked child, and it waits for them for ever.
    global _openmp
    _openmp = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_openmp)


def cpu_workers() -> tuple[int, int]:
    """Return ``(threads, OpenMP entry point or 0)`` as the CPU kernels take them."""
    return torch.get_num_threads(), _openmp
