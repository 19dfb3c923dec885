# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Byte and operation counts against hand counts."""

from sgl_moe_jit.bench.model import (
    expand_bytes,
    finalize_bytes,
    finalize_flops,
    norm_bytes,
    permute_bytes,
    separate_finalize_bytes,
)


def test_bytes_of_one_deepseek_token():
    # 8 rows, 1 shared, 1 output of 7168 bfloat16 each; 8 indices and 8 float32 weights
    assert finalize_bytes(1, 8, 7168, 2, 4) == 10 * 14336 + 64 == 143_424
    # no shared row: 9 rows; 5 of 8 slots present: 7 rows
    assert finalize_bytes(1, 8, 7168, 2, 4, has_shared=False) == 9 * 14336 + 64
    assert finalize_bytes(1, 8, 7168, 2, 4, rows_present=5) == 7 * 14336 + 64
    # the sum is written and read once more: 9 rows, then 2 reads and a write
    assert separate_finalize_bytes(1, 8, 7168, 2, 4) == 12 * 14336 + 64


def test_operations_of_one_deepseek_token():
    # 8 fused multiply-adds of two operations and one add for each of 7168 columns
    assert finalize_flops(1, 8, 7168) == 7168 * 17
    assert finalize_flops(2, 8, 7168, has_shared=False) == 2 * 7168 * 16


def test_bytes_of_two_tokens_with_a_norm():
    # each: 8 rows, shared, residual in, sum and result out, 8 indices and weights; one weight row
    assert norm_bytes(2, 8, 7168, 2, 4) == 2 * (12 * 14336 + 64) + 14336


def test_bytes_of_two_permuted_tokens():
    # each: one row read, 8 written; 8 int32 ids read and 8 int32 rows written
    assert permute_bytes(2, 8, 7168, 2, 4) == 2 * (9 * 14336 + 64)


def test_bytes_of_two_expanded_tokens():
    # 8 ids and weights of 4 bytes in, 9 of each out
    assert expand_bytes(2, 8, 4, 4) == 2 * (64 + 72)
