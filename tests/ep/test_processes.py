# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch and block over gloo, in processes of their own."""

import pytest
import torch
import torch.distributed as dist

from sgl_moe_jit.ep.transport import Transport
from tests.ep import parallel_worker

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch built with gloo"
)


@needs_gloo
def test_three_processes(tmp_path):
    torch.multiprocessing.spawn(
        parallel_worker.run, (str(tmp_path / "store"),), nprocs=parallel_worker.RANKS
    )


@pytest.mark.parametrize(
    ("backend", "device", "through_host", "text"),
    [
        ("gloo", "cuda", False, "expected a CPU tensor for the gloo group, .*stage_through_host=T"),
        ("nccl", "cpu", False, "expected a CUDA tensor for the NCCL group, .*make a gloo group"),
        ("gloo", "cuda", True, None),
        ("gloo", "cpu", False, None),
        ("nccl", "cuda", False, None),
    ],
)
def test_a_device_that_the_backend_cannot_read(monkeypatch, backend, device, through_host, text):
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    transport = Transport(object(), through_host)
    if text is None:
        transport.check_device(torch.device(device))
    else:
        with pytest.raises(ValueError, match=text):
            transport.check_device(torch.device(device))
