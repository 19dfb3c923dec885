# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench ep --simulate``: routing, placement, counts, its command, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sgl_moe_jit.bench import ep_simulate, ep_simulate_plot, ep_simulate_trace
from sgl_moe_jit.bench import ep_simulate_routing as routing
from sgl_moe_jit.bench.ep_simulate_model import OPTIMUM, PROVIDERS, measure, simulate
from sgl_moe_jit.ep.trace import load_trace

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRACE = ROOT / "benchmarks" / "traces" / "demo.npz"
SMALL = ["--ranks", "4,6", "--experts", "16", "--top-k", "4", "--tokens", "70", "--steps", "2"]


def run(*words) -> int:
    return ep_simulate.main([*words])


@pytest.mark.parametrize("kind", routing.ROUTINGS)
def test_a_token_chooses_distinct_experts_and_a_seed_decides_all(kind):
    ids, popularity = routing.synthetic(kind, 24, 6, 3, 50, 7)
    assert ids.shape == (3, 50, 6) and ids.min() >= 0 and ids.max() < 24
    assert (np.diff(np.sort(ids, axis=2)) > 0).all()
    again, _ = routing.synthetic(kind, 24, 6, 3, 50, 7)
    other, _ = routing.synthetic(kind, 24, 6, 3, 50, 8)
    assert (ids == again).all() and (ids != other).any()
    assert popularity.shape == (24,) and popularity.min() > 0


def test_routings_are_as_skewed_as_they_say():
    def shares(kind, first_tokens):
        ids, popularity = routing.synthetic(kind, 64, 1, 2, first_tokens, 0)
        count = np.bincount(ids[0].ravel(), minlength=64) / first_tokens
        return count, popularity / popularity.sum()

    for kind in ("uniform", "zipf"):
        count, expected = shares(kind, 20000)
        # five standard deviations of a count
        assert (abs(count - expected) < 5 * np.sqrt(expected / 20000)).all()
    # One topic: 16 of 64 experts hold 128 of 176 odds, which is 73 %.
    ids, _ = routing.synthetic("bursty", 64, 1, 40, 30, 0)
    tops = [np.sort(np.bincount(own.ravel(), minlength=64))[-16:].sum() / 30 for own in ids]
    assert np.mean(tops) > 0.65


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(256, 144), (384, 320), (60, 7), (8, 8)])
@pytest.mark.parametrize("kind", ["uniform", "zipf-eplb"])
def test_every_rank_owns_as_many_experts_and_replicas_share(kind, num_experts, num_ranks):
    popularity = np.arange(num_experts, 0, -1.0)
    extra = routing.redundant_experts(kind, num_experts, num_ranks)
    assert (num_experts + extra) % num_ranks == 0
    placed = routing.place(popularity, num_ranks, extra)
    owned = np.zeros(num_ranks, np.int64)
    for ranks, count in zip(placed.ranks, placed.replicas, strict=True):
        np.add.at(owned, ranks[:count], 1)
    assert (owned == (num_experts + extra) // num_ranks).all()
    assert placed.replicas.sum() == num_experts + extra
    # The rows of an expert go to its replicas in turn; no choice stays none.
    rows = np.zeros((int(placed.replicas[0]) * 3, 2), np.int64)
    rows[:, 1] = -1
    owners = placed.owners(rows)
    assert (owners[:, 1] == -1).all()
    want = np.bincount(np.repeat(placed.ranks[0, : placed.replicas[0]], 3), minlength=num_ranks)
    assert (np.bincount(owners[:, 0], minlength=num_ranks) == want).all()


def test_a_step_counted_by_hand():
    # Three ranks, two tokens each, two choices each; the last row is padding.
    hits = np.array([[[0, 1], [1, 1]], [[0, 2], [2, -1]], [[1, 0], [-1, -1]]])
    chosen = np.array([[2, 0], [1, 2], [1, -1]])
    got = measure(hits, chosen)
    # routed 3, 4, 2; shared 1, 2, 2
    assert (got.routed, got.max_load, got.level, got.bound) == (4, 6, 5, 5)
    assert got.tokens == 5
    assert got.extra_copies == 1  # rank 0's first row, sent to 2
    assert got.local_copies == 2  # rank 0's second row and rank 1's first, at home for nothing else
    assert got.dispatch_copies == 1 + 1 + 2 + 1 + 2  # other ranks that each row visits
    assert simulate(hits)[OPTIMUM].max_load == 5


def test_records_table_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sgl-moe-jit[bench]'")
    path = tmp_path / "out" / "sim.json"
    words = [*SMALL, "--json", str(path), "--plot", str(tmp_path / "png"), "--commit", "abc"]
    assert run(*words) == 0
    rows = json.loads(path.read_text())
    assert len(rows) == 2 * len(routing.ROUTINGS) * len(PROVIDERS)
    first = rows[0]
    assert first["command"] == (
        "python -m sgl_moe_jit bench ep --simulate --ranks 4,6 --experts 16 --top-k 4 --tokens 70 "
        "--steps 2 --json FILE --plot DIR"
    )
    assert first["subject"] == "ep" and first["commit"] == "abc" and first["steps"] == 2
    by = {(r["case"], r["num_ranks"], r["provider"]): r for r in rows}
    assert by["uniform", 6, "home"]["num_redundant"] == 2
    assert by["zipf-eplb", 4, "home"]["num_redundant"] == 32
    for (_, _, provider), row in by.items():
        assert row["load_over_level"] >= 1 and row["worst_load_over_bound"] >= 1
        assert row["local_copies"] + row["extra_copies"] <= 1
        if provider.startswith(("home", "restricted")):
            assert row["extra_copies"] == 0
            assert row["worst_load_over_optimum"] >= 1
    text = capsys.readouterr().out
    assert text.count("\nzipf ") == 2 and "exact, dynamic" in text
    png = tmp_path / "png" / "ep_simulate.png"
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size < 150_000
    # The same arguments, the same figures.
    again = tmp_path / "again.json"
    run(*SMALL, "--json", str(again), "--plot", str(tmp_path / "png"), "--commit", "abc")
    assert json.loads(again.read_text()) == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks: expected 1 or more, got"),
        (["--ranks", "8,513"], r"--ranks: expected at most 512, got \(8, 513\)"),
        (["--tokens", "-1"], "--tokens: expected 1 or more, got"),
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--seed", "-1"], "--seed: expected 0 or more, got -1"),
        (["--top-k", "17", "--experts", "16"], "--top-k: expected at most 16 experts, got 17"),
        (["--routing", "zipf,flat"], "--routing: expected some of uniform, zipf, .*'flat'"),
        (["--skew", "1"], "--skew: means nothing to bench ep --simulate"),
        (["--trace", str(TRACE), "--experts", "16"], "--experts: a trace has its own"),
        (["--trace", str(TRACE), "--tokens", "128"], "--tokens: expected at most 127 with 8 ranks"),
        (["--trace", str(TRACE), "--ranks", "16", "--tokens", "64"], "at most 63 with 16 ranks"),
    ],
)
def test_each_wrong_argument_is_named(words, message):
    with pytest.raises(ValueError, match=message):
        run(*words)


def test_the_committed_trace_is_the_demo_models(tmp_path, capsys):
    # Not bit for bit: another CPU's GEMMs may flip a near tie, and generation then goes on apart.
    trace = load_trace(TRACE)
    made = ep_simulate_trace.record_demo(tmp_path / "demo.npz", new_tokens=2)
    assert (trace.model, trace.num_experts, trace.top_k) == (made.model, 16, 4)
    for (layer, ids), (committed_layer, committed) in zip(made.calls, trace.calls, strict=False):
        assert layer == committed_layer and ids.shape == committed.shape
        assert (np.sort(ids) == np.sort(committed)).all(axis=1).mean() > 0.9
    assert TRACE.stat().st_size < 200_000
    assert run("--trace", str(TRACE), "--tokens", "100", "--commit", "abc") == 0
    assert "trace of demo " in capsys.readouterr().out


def committed(name):
    return json.loads((RESULTS / name).read_text())


@pytest.mark.parametrize("name", ["ep_simulate.json", "ep_simulate_tokens.json"])
def test_the_committed_results_reach_their_targets(name):
    rows = committed(name)
    for row in rows:
        if row["provider"] == "exact, dynamic":
            assert row["worst_load_over_bound"] <= 1.01
        if row["provider"].startswith("restricted"):
            assert row["extra_copies"] == 0
        if row["provider"] == "restricted, dynamic" and row["num_tokens"] >= 128:
            assert row["worst_load_over_optimum"] <= 1.02
    assert all((RESULTS / row["command"].split()[-1]).name for row in rows[:1])


def test_the_committed_results_are_what_the_simulator_says_today():
    rows = committed("ep_simulate.json")
    assert {row["num_ranks"] for row in rows} == set(ep_simulate.DEFAULTS["ranks"])
    arguments = ep_simulate.settle(
        ep_simulate.parse(["--ranks", "16", "--experts", "256", "--routing", "zipf-eplb,bursty"])
    )
    for records in ep_simulate.synthetic_scenarios(arguments):
        for record in records:
            assert any(record.items() <= row.items() for row in rows), record


def test_a_plot_without_records_says_so(tmp_path):
    with pytest.raises(ValueError, match="plot: expected at least one record"):
        ep_simulate_plot.draw([], tmp_path / "x.png")
