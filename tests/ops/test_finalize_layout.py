# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared on tensors that lie awkwardly: misaligned, strided, aliased, huge."""

from dataclasses import replace

import pytest
import torch

from tests.ops.finalize_cases import (
    BF16,
    DEVICES,
    F16,
    F32,
    Inputs,
    assert_matches_oracle,
    assert_same_bits,
    make,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])


@on_devices
@dtypes
@field_report("M8")
@field_report("M9")
@pytest.mark.parametrize("which", ["gemm2_out", "idx", "weights", "shared", "gate", "out"])
def test_misaligned_and_strided_tensors(device, dtype, which):
    for num_tokens in (3, 200):  # one thread and several on a CPU
        gate = dtype if which == "gate" else None
        inputs = make(num_tokens, 8, 64, device=device, dtype=dtype, gate=gate)
        want = inputs.run()
        out = torch.empty_like(want)
        x = out if which == "out" else getattr(inputs, which)
        storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)
        moved = storage[1:].view(x.shape).copy_(x)  # contiguous, one element off alignment
        assert moved.data_ptr() % 16 != 0
        if which == "out":
            assert_same_bits(inputs.run(out=moved), want)
        else:
            assert_same_bits(replace(inputs, **{which: moved}).run(), want)
        if which in ("gemm2_out", "shared", "out"):
            wide = torch.full((x.shape[0], 67), float("nan"), dtype=dtype, device=device)
            view = wide[:, 1:65].copy_(x)  # row stride 67: no row after the first is aligned
            if which == "out":
                assert_same_bits(inputs.run(out=view), want)
                assert wide[:, 0].isnan().all() and wide[:, 65:].isnan().all()
            else:
                assert_same_bits(replace(inputs, **{which: view}).run(), want)


@on_devices
@field_report("M9")
def test_expanded_shared_row(device):
    inputs = make(5, 4, 32, device=device)
    row = inputs.shared[:1]
    got = replace(inputs, shared=row.expand(5, 32)).run()
    assert_same_bits(got, replace(inputs, shared=row.repeat(5, 1)).run())


@on_devices
@dtypes
def test_vector_and_scalar_paths_give_the_same_bits(device, dtype, monkeypatch):
    for num_tokens in (1, 130):
        for top_k in (8, 3):
            inputs = make(num_tokens, top_k, 512, device=device, dtype=dtype, factor=2.5)
            want = inputs.run()
            monkeypatch.setenv("SGL_MOE_JIT_VECTOR", "0")
            assert_same_bits(inputs.run(), want)
            monkeypatch.delenv("SGL_MOE_JIT_VECTOR")


@on_devices
def test_out_may_be_the_shared_output(device):
    for hidden, gate in ((136, None), (37, F32), (1024, F32)):
        inputs = make(9, 8, hidden, device=device, gate=gate)
        want = inputs.run()
        shared = inputs.shared.clone()
        got = replace(inputs, shared=shared).run(out=shared)
        assert got is shared
        assert_same_bits(got, want)


@on_devices
@field_report("M1")
def test_rows_beyond_two_to_the_31_elements(device):
    rows, hidden = 300_001, 7168  # 4.3 GB; only the pages of the rows used are touched on a CPU
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    gemm2_out = torch.empty(rows, hidden, dtype=BF16, device=device)
    used = torch.tensor([rows - 1, 299_594, 0, rows - 2], dtype=torch.int32, device=device)
    gemm2_out[used.long()] = torch.randn(4, hidden, device=device).to(BF16)
    idx = torch.tensor([[0, 1, -1, 2], [3, -1, -1, 0], [-1, -1, -1, -1]], device=device)
    idx = torch.where(idx >= 0, used[idx.clamp(min=0)], -1).int()
    shared = torch.randn(3, hidden, device=device).to(BF16)
    inputs = Inputs(gemm2_out, idx, torch.rand(3, 4, device=device), shared, 4)
    got = inputs.run()
    small = replace(inputs, gemm2_out=gemm2_out[used.long()])
    place = {int(u): i for i, u in enumerate(used)}
    small_idx = [[place.get(v, -1) for v in row] for row in idx.tolist()]
    small = replace(small, idx=torch.tensor(small_idx, dtype=torch.int32, device=device))
    assert_matches_oracle(got, small)
    assert_same_bits(got[2], shared[2])
