# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The default process group, for a test's own processes."""

import contextlib

import torch
import torch.distributed as dist


@contextlib.contextmanager
def joined(rank, store, ranks, backend="gloo"):
    """Be one of ``ranks``, which meet at the file ``store``; on a CPU with one thread."""
    if backend == "gloo":
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        with torch.no_grad():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
