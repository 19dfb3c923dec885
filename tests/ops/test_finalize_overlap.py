# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which outputs share memory with an input: decided by the elements, not by their range."""

import random

import pytest
import torch

from sgl_moe_jit.ops import moe_finalize_fuse_shared, moe_finalize_fuse_shared_add_rmsnorm
from tests.ops.finalize_cases import DEVICES, F32

on_devices = pytest.mark.parametrize("device", DEVICES)


def finalize(gemm2_out, out, shared=None):
    idx = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)[:, None]
    weights = torch.full((out.shape[0], 1), 2.0, device=out.device)
    hidden_dim = out.shape[1] if shared is None else None
    return moe_finalize_fuse_shared(
        gemm2_out, idx, weights, shared, 1, hidden_dim=hidden_dim, out=out
    )


@on_devices
def test_interleaved_columns_of_one_storage_are_apart(device):
    both = torch.randn(5, 48, device=device)
    rows, out = both[:, :24], both[:, 24:]
    want, kept = rows * 2, rows.clone()
    assert torch.equal(finalize(rows, out), want)
    assert torch.equal(rows, kept)
    with pytest.raises(ValueError, match="out: shares memory with gemm2_out"):
        finalize(both[:, :25], both[:, 24:48])
    assert torch.equal(rows, kept) and torch.equal(out, want)
    # The same for a shared row, which may also be exactly the output.
    shared = torch.randn(5, 72, device=device)
    want = rows * 2 + shared[:, :24]
    assert torch.equal(finalize(rows, shared[:, 24:48], shared[:, :24]), want)
    with pytest.raises(ValueError, match="out: shares part of its memory with shared_output"):
        finalize(rows, shared[:, 23:47], shared[:, :24])
    assert torch.equal(finalize(rows, shared[:, :24], shared[:, :24]), want)


@on_devices
def test_the_norm_op_decides_alike(device):
    both = torch.randn(5, 64, device=device)
    rows, weight = torch.randn(5, 32, device=device), torch.ones(32, device=device)
    idx = torch.arange(5, dtype=torch.int32, device=device)[:, None]

    def run(residual, **outputs):
        return moe_finalize_fuse_shared_add_rmsnorm(
            rows, idx, None, None, 1, residual, weight, 1e-6, **outputs
        )

    want = run(both[:, :32].clone())
    got = run(both[:, :32], out=both[:, 32:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="out: shares memory with residual"):
        run(both[:, :32], out=both[:, 31:63])
    whole = torch.empty(5, 64, device=device)
    got = run(both[:, :32], out=whole[:, :32], residual_out=whole[:, 32:])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="residual_out: shares memory with out"):
        run(both[:, :32], out=whole[:, :32], residual_out=whole[:, 31:63])


def elements(x):
    numbers = torch.arange(x.untyped_storage().nbytes() // 4)
    seen = torch.as_strided(numbers, x.shape, x.stride(), x.storage_offset())
    return set(seen.flatten().tolist())


def test_random_views_against_sets_of_elements():
    """Other row strides, rows that overlap among themselves, one row, every order of the two."""
    choose = random.Random(7)
    sharing = interleaved = 0
    for _ in range(600):
        storage = torch.randn(400)
        width, tokens = choose.randint(1, 6), choose.randint(1, 7)
        out = torch.as_strided(
            storage, (tokens, width), (width + choose.randint(0, 12), 1), choose.randint(0, 200)
        )
        num_rows = choose.randint(tokens, 9)
        rows = torch.as_strided(
            storage,
            (num_rows, width + choose.randint(0, 4)),
            (choose.randint(0, 18), 1),
            choose.randint(0, 200),
        )
        written, read = elements(out), elements(rows)
        shares = bool(written & read)
        sharing += shares
        interleaved += not shares and min(written) < max(read) and min(read) < max(written)
        want = rows[:tokens, :width].clone() * 2
        if shares:
            with pytest.raises(ValueError, match="out: shares memory with gemm2_out"):
                finalize(rows, out)
        else:
            assert torch.equal(finalize(rows, out), want)
    assert sharing > 50 and interleaved > 20, (sharing, interleaved)


def test_nothing_is_allocated_for_a_call_that_is_refused():
    """2^40 tokens by a stride of 0: their output would be 64 TB, which torch has words for."""
    idx = torch.zeros(1, 8, dtype=torch.int32).expand(2**40, 8)
    weights = torch.ones(1, 8).expand(2**40, 8)
    rows = torch.randn(8, 32).bfloat16()
    with pytest.raises(ValueError, match="expert_weights: expected a contiguous tensor"):
        moe_finalize_fuse_shared(rows, idx, weights, None, 8)
    with pytest.raises(ValueError, match="expanded_idx_to_permuted_idx: expected num_tokens"):
        moe_finalize_fuse_shared(rows, idx, None, None, 8)
    assert torch.zeros(1, dtype=F32).item() == 0
