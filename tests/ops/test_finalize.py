# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Values of moe_finalize_fuse_shared, on the CPU and (marked gpu) on CUDA."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ops import reference
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
weight_dtypes = pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=["w32", "w16", "wh"])


# K: each unrolled variant, the generic loop below, between and above them, its tail of 1 to 3, the
# public models' odd ones (9 = 8 + a fused shared slot, 22 Nemotron), and both ends of the range.
@on_devices
@dtypes
@field_report("M12")
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 22, 63, 64])
def test_top_k(device, dtype, top_k):
    for hidden in (64, 37):  # vector path, scalar path
        for weight_dtype in (F32, None):
            inputs = make(
                5,
                top_k,
                hidden,
                device=device,
                dtype=dtype,
                weight_dtype=weight_dtype,
                factor=2.5,
                seed=top_k,
            )
            assert_matches_oracle(inputs.run(), inputs)


# H: scalar sizes, one vector, public models (gpt-oss padded to a multiple of 256), many tiles.
@on_devices
@dtypes
@weight_dtypes
@pytest.mark.parametrize("hidden", [1, 7, 8, 2560, 2880, 3584, 7168])
def test_hidden_and_padding(device, dtype, weight_dtype, hidden):
    for padded in sorted({hidden, hidden + 8, (hidden + 255) // 256 * 256}):
        for shared in (True, False):
            inputs = make(
                3,
                8,
                hidden,
                padded=padded,
                device=device,
                dtype=dtype,
                weight_dtype=weight_dtype,
                shared=shared,
                seed=hidden,
            )
            assert_matches_oracle(inputs.run(), inputs)


# T: one; a few; more blocks than a chip holds; 8193 and 16384 cross where others' grids end.
# Small H keeps the CPU quick; test_finalize_gpu.py takes the launch shape of large calls.
@on_devices
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 128, 129, 192, 193, 1184, 8193, 16384])
def test_token_counts(device, num_tokens):
    inputs = make(num_tokens, 2, 24, device=device, seed=num_tokens)
    assert_matches_oracle(inputs.run(), inputs)


@on_devices
@dtypes
@field_report("M4")
@field_report("M16")
def test_a_token_without_rows_copies_its_shared_row_bit_for_bit(device, dtype):
    inputs = make(4, 8, 40, device=device, dtype=dtype, factor=2.5)
    shared = inputs.shared.clone()
    subnormal = torch.finfo(dtype).smallest_normal / 4
    shared[1, :4] = torch.tensor([-0.0, float("nan"), float("inf"), subnormal], dtype=dtype)
    idx, weights = inputs.idx.clone(), inputs.weights.clone()
    idx[1], weights[1] = -1, float("nan")
    got = replace(inputs, idx=idx, weights=weights, shared=shared).run()
    assert_same_bits(got[1], shared[1])
    clean = inputs.run()
    for t in (0, 2, 3):  # the padded row disturbs no other
        assert_same_bits(got[t], clean[t])
    alone = replace(inputs, idx=idx, weights=weights, shared=None, hidden_dim=40).run()
    assert_same_bits(alone[1], torch.zeros(40, dtype=dtype, device=device))


@on_devices
@field_report("M16")
def test_padded_rows_change_nothing(device):
    inputs = make(8, 8, 72, device=device)
    idx, weights = inputs.idx.clone(), inputs.weights.clone()
    idx[5:], weights[5:] = -1, float("nan")
    got = replace(inputs, idx=idx, weights=weights).run()
    assert_same_bits(got[:5], inputs.tokens(0, 5).run())
    assert_same_bits(got[5:], inputs.shared[5:])


@on_devices
@dtypes
def test_minus_two_is_no_row_either(device, dtype):
    inputs = make(4, 4, 16, device=device, dtype=dtype, absent=0.5)
    idx = torch.where(inputs.idx < 0, torch.full_like(inputs.idx, -(2**31)), inputs.idx)
    assert_same_bits(replace(inputs, idx=idx).run(), inputs.run())


@on_devices
@dtypes
@field_report("M6")
@pytest.mark.parametrize("shared", [True, False])
def test_zero_tokens(device, dtype, shared):
    inputs = make(0, 8, 16, device=device, dtype=dtype, shared=shared)
    got = inputs.run()
    assert got.shape == (0, 16) and got.dtype == dtype
    assert torch.zeros(1, device=device).item() == 0  # no launch error is left behind


@on_devices
@field_report("M13")
def test_flat_and_matrix_index_give_the_same_bits(device):
    inputs = make(6, 8, 48, device=device)
    assert_same_bits(replace(inputs, idx=inputs.idx.reshape(-1)).run(), inputs.run())


@on_devices
@field_report("M14")
def test_repeats_are_bitwise_equal_and_rows_do_not_depend_on_their_batch(device):
    inputs = make(200, 8, 264, device=device)
    want = inputs.run()
    for _ in range(100 if device == "cuda" else 10):
        assert_same_bits(inputs.run(), want)
    for t in (0, 1, 127, 128, 199):
        assert_same_bits(inputs.tokens(t, t + 1).run(), want[t : t + 1])
    assert_same_bits(inputs.tokens(0, 64).run(), want[:64])


@on_devices
@dtypes
def test_subnormals_are_kept(device, dtype):
    tiny = torch.finfo(dtype).smallest_normal / 4
    inputs = Inputs(
        torch.full((1, 16), tiny, dtype=dtype),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, 1),
        None,
        1,
    ).to(device)
    got = inputs.run()
    assert_same_bits(got, torch.full((1, 16), tiny, dtype=dtype, device=device))


def test_flush_to_zero_of_one_thread_changes_nothing():
    """Which thread takes which tokens is chance; torch sets the mode for the calling one only."""
    tokens = 4096
    inputs = Inputs(
        torch.full((8, 512), 1e-40),
        torch.zeros(tokens, 2, dtype=torch.int32),
        torch.ones(tokens, 2),
        None,
        2,
    )
    want = 2 * torch.full((tokens, 512), 1e-40)
    try:
        torch.set_flush_denormal(True)
        got = [inputs.run() for _ in range(5)]
    finally:
        torch.set_flush_denormal(False)
    for result in got:
        assert_same_bits(result, want)


@on_devices
@dtypes
@pytest.mark.parametrize("shared", [True, False])
def test_no_weights_are_weights_of_one(device, dtype, shared):
    inputs = make(7, 8, 40, device=device, dtype=dtype, weight_dtype=None, shared=shared)
    ones = torch.ones(7, 8, device=device)
    want = replace(inputs, weights=ones).run()
    assert_same_bits(inputs.run(), want)
    assert_same_bits(replace(inputs, idx=inputs.idx.reshape(-1)).run(), want)  # T from the indices
    assert_same_bits(inputs.run(out=torch.empty_like(want)), want)
    empty = make(0, 8, 16, device=device, dtype=dtype, weight_dtype=None, shared=shared)
    assert empty.run().shape == (0, 16)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_tolerance_is_sharp(dtype):
    """A correct result uses the allowance; two roundings or a 2 % weight error exceed it."""
    inputs = make(16, 8, 512, dtype=dtype, absent=0.0)
    want, allowed = inputs.oracle(), inputs.oracle(reference.finalize_tolerance)
    used = ((inputs.run().double() - want).abs() / allowed).max()
    assert 0.9 < used <= 1
    routed = replace(inputs, shared=None).run()
    twice = (routed + inputs.shared).double()
    assert ((twice - want).abs() > allowed).double().mean() > 0.05
    weights = inputs.weights.clone()
    weights[:, 3] *= 1.02
    off = replace(inputs, weights=weights).run().double()
    assert ((off - want).abs() > allowed).any()
