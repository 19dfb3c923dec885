# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's first call, in a process of its own: with an empty cache, then with a filled one.

``python -m sgl_moe_jit.bench.demo_jit cpu`` prints the seconds of one first call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from sgl_moe_jit import env

# A kernel builds in seconds; a child that takes this long is stuck.
_TIMEOUT_S = 600


@dataclass(frozen=True)
class JitResult:
    """Seconds until the finalize kernel has run once; imports and CUDA start-up are not counted.

    Attributes:
        cold_seconds: In a process that finds an empty cache; None when it could not build.
        warm_milliseconds: In the next process, from that cache.
        error: Why there are no numbers.
    """

    cold_seconds: float | None
    warm_milliseconds: float | None
    error: str | None = None


def first_call_seconds(device_name: str) -> float:
    """Return how long the first finalize of this process takes, its module's load included."""
    import torch
    import tvm_ffi  # noqa: F401 - imported here so that the import is not timed

    from sgl_moe_jit.ops import moe_finalize_fuse_shared

    rows = torch.ones(8, 7168, dtype=torch.bfloat16, device=device_name)
    idx = torch.arange(8, dtype=torch.int32, device=device_name).view(1, 8)
    weights = torch.ones(1, 8, device=device_name)
    if device_name != "cpu":
        torch.cuda.synchronize()
    started = time.perf_counter()
    moe_finalize_fuse_shared(rows, idx, weights, rows[:1], 8)
    if device_name != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _child(device_name: str, folder: str) -> float:
    # The child must find this very package, also when it came from the current folder.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", __name__, device_name],
        env={**os.environ, "PYTHONPATH": path, env.CACHE_DIR.name: folder},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return float(done.stdout.split()[-1])


def time_first_calls(device_name: str) -> JitResult:
    """Time the first call in two child processes that share a cache folder, empty at first."""
    with tempfile.TemporaryDirectory(prefix="sgl_moe_jit-demo-") as folder:
        try:
            cold = _child(device_name, folder)
            warm = _child(device_name, folder)
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            return JitResult(None, None, str(error))
    return JitResult(cold, warm * 1e3)


if __name__ == "__main__":
    print(first_call_seconds(sys.argv[1]))
