# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Dispatch, block and balancer on GPUs, in processes of their own."""

import pytest
import torch

from tests.ep import device_worker


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(1, "nccl", id="one-rank-over-nccl"),
        pytest.param(2, "gloo", id="two-ranks-on-one-gpu-through-the-host"),
        pytest.param(3, "gloo", id="three-ranks-on-one-gpu-through-the-host"),
        pytest.param(2, "nccl", id="two-gpus-over-nccl", marks=pytest.mark.multigpu),
    ],
)
def test_processes_on_gpus(tmp_path, ranks, backend):
    store = str(tmp_path / "store")
    torch.multiprocessing.spawn(device_worker.run, (store, ranks, backend), nprocs=ranks)
