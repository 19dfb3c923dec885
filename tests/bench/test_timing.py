# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How times are taken: quantiles, turns, buffers, and contestants that fail."""

import collections

import torch

from sgl_moe_jit.bench import timing
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.timing import Timing, copies_for_cold, time_cpu, turns


def test_timing_quantiles_and_copies():
    took = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (took.median_us, took.p20_us, took.p80_us, took.samples) == (3.0, 2.0, 5.0, 5)
    assert copies_for_cold(100, 1000) == 31  # 31 * 100 bytes exceed three times 1000
    assert copies_for_cold(10_000, 1000) == 4


def test_nobody_always_follows_the_same_provider():
    names = ["a", "b", "c", "d"]
    followed = collections.defaultdict(set)
    before = None
    for order in turns(names, 28):
        assert sorted(order) == names
        for name in order:
            followed[name].add(before)
            before = name
    for name in names:
        assert set(names) - {name} <= followed[name]
    assert list(turns(names, 5)) == list(turns(names, 5)), "every run takes the same turns"


def test_no_call_gets_the_buffers_that_were_just_used():
    used = []
    providers = {name: [lambda i=i: used.append(i) for i in range(7)] for name in "abc"}
    times = time_cpu(providers, rounds=10, warmup=0)
    assert set(times) == set("abc") and times["a"].samples == 10
    assert len(used) == 30
    assert used == [i % 7 for i in range(30)], "each call takes the next set, whoever makes it"


def entry(calls, check=lambda: None):
    return lambda: Contestant(calls, check, "a note")


def wrong():
    raise WrongResultError("peer: out: 3 of 4 elements are wrong\nmore")


def test_a_provider_that_fails_is_left_out_and_named():
    contest = Contest(rounds=2)
    called = []
    outcomes = contest.on_cpu(
        "case, 1 token",
        {
            "sgl_moe_jit": entry([lambda: None]),
            "peer": entry([lambda: called.append(1)], wrong),
            "good": entry([lambda: None]),
        },
    )
    assert list(outcomes) == ["sgl_moe_jit", "good"] and not called
    assert outcomes["good"].note == "a note"
    assert contest.failures == [
        "case, 1 token: peer: WrongResultError: peer: out: 3 of 4 elements are wrong"
    ]


def test_a_provider_that_does_not_build_is_left_out():
    def broken():
        raise OSError("no such header")

    contest = Contest()
    made = contest.prepare({"sgl_moe_jit": lambda: 1, "peer": broken, "torch": lambda: 3})
    assert made == {"sgl_moe_jit": 1, "torch": 3}
    assert contest.failures == ["build: peer: OSError: no such header"]


def test_rounds_are_divided_among_several_captures(monkeypatch):
    captured, rounds_of = [], []

    def capture_long(calls):
        captured.append(calls[0])
        if calls[0] == "broken" and captured.count("broken") == 2:
            raise RuntimeError("no room")
        return object(), 1

    def sample_graphs(graphs, rounds):
        rounds_of.append((tuple(graphs), rounds))
        return {name: [float(len(rounds_of))] * rounds for name in graphs}

    monkeypatch.setattr(timing, "capture_long", capture_long)
    monkeypatch.setattr(timing, "sample_graphs", sample_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    names = ("a", "b", "broken")
    makers = {name: lambda name=name: Contestant([name], lambda: None) for name in names}
    fair = Contest(rounds=5)
    outcomes = fair.on_cuda("shape", makers, captures=3)
    # Each comes first once; whoever fails later on is out, and the others go on.
    assert captured == ["a", "b", "broken", "b", "broken", "a", "b", "a"]
    assert [rounds for _, rounds in rounds_of] == [2, 2, 2]
    assert {name: outcome.timing.samples for name, outcome in outcomes.items()} == {"a": 6, "b": 6}
    assert outcomes["a"].timing.median_us == 2.0
    assert fair.failures == ["shape: broken: RuntimeError: no room"]
