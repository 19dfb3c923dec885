# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench``: its arguments, its errors, and the records that tiny CPU runs write."""

import argparse
import json

import pytest
import torch

from sgl_moe_jit import cli
from sgl_moe_jit.bench import command, cpu
from sgl_moe_jit.bench.cases import CASES, cases_named
from sgl_moe_jit.bench.kernels import parse_peers, peer_version
from sgl_moe_jit.bench.model import finalize_bytes

FIELDS = {
    *("subject", "case", "num_tokens", "hidden_dim", "top_k", "mode", "weight_dtype", "provider"),
    *("median_us", "p20_us", "p80_us", "bytes", "device", "versions", "commit", "command"),
    *("samples", "date", "cache_bytes", "note", "share_of_peak"),
}


def parse(*words):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(words)


@pytest.fixture
def small_cache(monkeypatch):
    monkeypatch.setattr(cpu, "last_level_cache_bytes", lambda: 1 << 16)
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: None)  # it would outlive the test


def test_bench_cpu_checks_times_and_writes_records(tmp_path, capsys, small_cache):
    path = tmp_path / "out" / "cpu.json"
    words = ["bench", "cpu", "--cases", "qwen3-30b", "--tokens", "2", "--rounds", "2"]
    assert cli.main([*words, "--json", str(path), "--commit", "abc"]) == 0
    assert "qwen3-30b" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["provider"] for row in rows] == ["sgl_moe_jit", "torch", "torch bmm", "copy"]
    for row in rows:
        assert set(row) == FIELDS
        assert row["subject"] == "cpu" and row["num_tokens"] == 2 and row["hidden_dim"] == 2048
        assert row["bytes"] == finalize_bytes(2, 8, 2048, 2, 4) and row["cache_bytes"] == 1 << 16
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["commit"] == "abc" and row["device"] and row["versions"]["torch"]
        assert row["command"] == (
            "python -m sgl_moe_jit bench cpu --cases qwen3-30b --tokens 2 --rounds 2 --json FILE"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the GPU's eager calls there")
def test_bench_host_times_tiny_calls_on_a_cpu(tmp_path):
    path = tmp_path / "host.json"
    chosen = "sgl_moe_jit,torch.empty,raw call"
    words = ["bench", "host", "--rounds", "2", "--json", str(path), "--providers", chosen]
    assert cli.main(words) == 0
    rows = json.loads(path.read_text())
    assert [row["provider"] for row in rows] == ["sgl_moe_jit", "raw call", "torch.empty"]
    for row in rows:
        assert set(row) == FIELDS and row["mode"] == "eager" and row["samples"] == 2


def test_the_command_holds_no_path_of_the_machine():
    arguments = parse(
        *("finalize", "--peer", "sglang=/some/where", "--peer", "flashinfer=/else/where"),
        *("--json", "/a/file.json", "--plot", "/a/folder", "--commit", "abc"),
        *("--cases", "all", "--tokens", "1,16", "--providers", "sgl_moe_jit,torch"),
    )
    assert command.command_line(arguments) == (
        "python -m sgl_moe_jit bench finalize --cases all --tokens 1,16 "
        "--providers sgl_moe_jit,torch --peer sglang=DIR --peer flashinfer=DIR --json FILE "
        "--plot DIR"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu", "--cases", "gpt-9"], "--cases: expected all or some of deepseek-v3, .*'gpt-9'"),
        (["cpu", "--tokens", "0"], "--tokens: expected numbers of at least 1, got"),
        (["cpu", "--rounds", "0"], "--rounds: expected 1 or more, got 0"),
        (["cpu", "--providers", "tornado"], "--providers: expected some of sgl_moe_jit, torch"),
        (["cpu", "--modes", "hot"], "--modes: means nothing to bench cpu; leave it out"),
        (["host", "--plot", "x"], "--plot: means nothing to bench host; leave it out"),
        (["jit", "--tokens", "1"], "--tokens: means nothing to bench jit; leave it out"),
        (["all", "--json", "x"], "expected one subject, got all"),
        (["finalize", "--modes", "warm"], "--modes: expected hot, cold or both, got 'warm'"),
        (["finalize", "--peer", "sglang"], "--peer: expected sglang=DIR or flashinfer=DIR, got"),
        (["finalize", "--peer", "vllm=x"], "--peer: expected sglang=DIR or flashinfer=DIR, got"),
        (
            ["finalize", "--peer", "sglang=x"],
            "--peer sglang: expected moe_finalize_fuse_shared.cu or deep",
        ),
    ],
)
def test_each_wrong_argument_is_named(words, message, small_cache):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        command.run(parse(*words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("subject", ["finalize", "norm", "permute", "waterfill", "route", "layer"])
def test_a_gpu_subject_without_a_gpu_says_so(subject, capsys):
    assert cli.main(["bench", subject]) == 1
    assert f"error: bench {subject}: needs a CUDA device" in capsys.readouterr().err


def test_a_failed_peer_makes_the_run_fail(monkeypatch, small_cache, capsys):
    made = cpu.entries()

    def broken():
        raise OSError("broken")

    monkeypatch.setattr(cpu, "entries", lambda: {**made, "torch": broken})
    words = ["bench", "cpu", "--cases", "qwen3-30b", "--tokens", "1", "--rounds", "1"]
    assert cli.main(words) == 1
    captured = capsys.readouterr()
    assert "not timed: build: torch: OSError: broken" in captured.err
    assert "torch bmm" in captured.out


def test_cases_by_name():
    assert [case.name for case in cases_named(["all"])] == list(CASES)
    assert cases_named(["llama4", "kimi-k2"]) == [CASES["llama4"], CASES["kimi-k2"]]


def test_a_peers_folder_tells_its_version(tmp_path):
    (tmp_path / "moe_finalize_fuse_shared.cu").touch()
    assert parse_peers([f"sglang={tmp_path}"]) == {"sglang": tmp_path.resolve()}
    assert peer_version(tmp_path) == "unknown"
    (tmp_path / "version.txt").write_text("1.2.3\n")
    assert peer_version(tmp_path) == "1.2.3"


def test_the_last_level_cache_has_a_size():
    assert cpu.last_level_cache_bytes() >= 1 << 16
