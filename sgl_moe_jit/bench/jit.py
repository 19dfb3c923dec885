# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench jit``: the hot kernel's first build, and its load in the next process.

``python -m sgl_moe_jit.bench.jit 9.0a`` prints the seconds of one load in its own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from sgl_moe_jit import env
from sgl_moe_jit.bench.contest import Contest
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import Timing
from sgl_moe_jit.jit import CudaArch, load_spec
from sgl_moe_jit.ops.finalize_kernel import cuda_spec

_ROUNDS = 7


def load_seconds(arch: str) -> float:
    """Return how long this process takes to have the module, from source or from the cache."""
    import tvm_ffi  # noqa: F401 - imported here so that the import is not timed

    started = time.perf_counter()
    load_spec(cuda_spec(torch.bfloat16, torch.float32, 8, CudaArch.parse(arch)))
    return time.perf_counter() - started


def _child(arch: str, folder: str) -> float:
    path = os.pathsep.join(entry or os.curdir for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", __name__, arch],
        env={**os.environ, "PYTHONPATH": path, env.CACHE_DIR.name: folder},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Time cold builds, each into an empty folder, and warm loads, each in a new process."""
    arch = options.arch
    cold, warm = [], []
    for _ in range(_ROUNDS):
        with tempfile.TemporaryDirectory(prefix="sgl_moe_jit-bench-") as folder:
            cold.append(_child(arch, folder) * 1e6)
            warm.append(_child(arch, folder) * 1e6)
    case = f"finalize top 8 {CudaArch.parse(arch).name}"
    yield [
        Record("jit", case, 0, 0, 8, mode, "float32", "sgl_moe_jit", Timing.of(samples), 0)
        for mode, samples in (("cold", cold), ("warm", warm))
    ]


if __name__ == "__main__":
    print(load_seconds(sys.argv[1]))
