# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Byte and operation counts against hand counts, and the bench command's plumbing."""

import json

import pytest

from sgl_moe_jit import cli
from sgl_moe_jit.bench.model import finalize_bytes, finalize_flops, separate_finalize_bytes
from sgl_moe_jit.bench.timing import Timing, copies_for_cold


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


def test_timing_quantiles_and_copies():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.median_us, timing.p20_us, timing.p80_us, timing.samples) == (3.0, 2.0, 5.0, 5)
    assert copies_for_cold(100, 1000) == 31  # 31 * 100 bytes exceed three times 1000
    assert copies_for_cold(10_000, 1000) == 4


def test_bench_cpu_checks_times_and_writes_records(tmp_path, capsys):
    path = tmp_path / "out" / "cpu.json"
    command = ["bench", "cpu", "--cases", "qwen3-30b", "--tokens", "2", "--rounds", "2"]
    assert cli.main([*command, "--json", str(path), "--commit", "abc"]) == 0
    assert "qwen3-30b" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["provider"] for row in rows] == ["sgl_moe_jit", "torch", "torch bmm"]
    for row in rows:
        assert row["subject"] == "cpu" and row["num_tokens"] == 2 and row["hidden_dim"] == 2048
        assert row["bytes"] == finalize_bytes(2, 8, 2048, 2, 4)
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["commit"] == "abc" and row["device"] and row["versions"]["torch"]


def test_a_wrong_provider_is_not_timed():
    from sgl_moe_jit.bench import finalize
    from sgl_moe_jit.bench.cases import CASES
    from sgl_moe_jit.bench.peers import ours

    def without_shared(inputs, top_k):
        right = ours(inputs, top_k)
        return lambda: (right(), inputs.out.sub_(inputs.shared_output))

    with pytest.raises(AssertionError, match=r"wrong: .* elements are wrong"):
        finalize.bench_cpu(CASES["qwen3-30b"], 2, {"wrong": without_shared}, 1)


def test_bench_names_a_wrong_case(capsys):
    with pytest.raises((SystemExit, ValueError)):
        raise SystemExit(cli.main(["bench", "cpu", "--cases", "gpt-9"]))
