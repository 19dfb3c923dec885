# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench ep``: processes that dispatch, the oracle that stands before their times, arguments."""

import argparse
import json
import os

import pytest
import torch
import torch.distributed as dist

from sgl_moe_jit import cli
from sgl_moe_jit.bench import command, ep, ep_job, ep_layer, ep_ranks, figures
from sgl_moe_jit.bench.ep_job import OURS, SEPARATE, WATERFILL, Job, Measured
from sgl_moe_jit.bench.timing import Timing
from sgl_moe_jit.ops.waterfill import MIN_TOKENS

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch built with gloo"
)


def parse(*words):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(["ep", *words])


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


@needs_gloo
def test_two_processes_end_to_end(tmp_path, capfd):
    path = tmp_path / "ep.json"
    words = ["--ranks", "2", "--tokens", "9", "--rounds", "2", "--skew", "1"]
    words += ["--enable-waterfill", "--fixed-size"]
    assert cli.main(["bench", "ep", "--device", "cpu", *words, "--json", str(path)]) == 0
    rows = {row["provider"]: row for row in json.loads(path.read_text())}
    assert list(rows) == [OURS, WATERFILL, "sgl_moe_jit fixed size", SEPARATE]
    routed = rows[OURS]["routed_rows_per_rank"]
    assert sum(routed) == 2 * 9 * 4 and routed[0] > routed[1]
    for name, row in rows.items():
        assert row["subject"] == "ep" and row["ranks"] == 2 and row["backend"] == "gloo"
        assert row["samples"] == 2 and row["median_us"] > 0 and row["worst_share"] < 2**-6
        assert row["routed_rows_per_rank"] == routed
        shared = [a - b for a, b in zip(row["rows_per_rank"], routed, strict=True)]
        assert sum(shared) == 18  # every token's shared expert, once
        # At home 9 a rank; waterfill, by each source's own counts, sends all where there is room.
        assert shared == ([0, 18] if name == WATERFILL else [9, 9])
    assert rows[OURS]["command"] == (
        "python -m sgl_moe_jit bench ep --tokens 9 --rounds 2 --ranks 2 --device cpu --skew 1.0 "
        "--enable-waterfill --fixed-size --json FILE"
    )
    table = figures.FIGURES["ep"](path).splitlines()
    assert "skew 1, slowest rank" in table[0] and len(table) == 8
    assert table[4].startswith(f"| tiny | 2 | gloo | 9 | {OURS} | ")
    assert table[4].endswith(f"| {routed[0] + 9}, {routed[1] + 9} |")
    printed = capfd.readouterr().out
    assert f"2 ranks, gloo, {SEPARATE}: rows a rank" in printed


@needs_gloo
def test_two_processes_exchange_their_choices(tmp_path):
    """Each must hand the other its ids, and the two must agree on who takes which shared row."""
    path = tmp_path / "ep.json"
    words = ["--ranks", "2", "--tokens", "9,4", "--rounds", "1", "--enable-waterfill", "--dynamic"]
    words += ["--exchange-choices", "--waterfill-mode", "exact_restricted"]
    words += ["--providers", f"{OURS},{WATERFILL}"]
    assert cli.main(["bench", "ep", "--device", "cpu", *words, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [(row["num_tokens"], row["provider"]) for row in rows] == [
        (count, name) for count in (9, 4) for name in (OURS, WATERFILL)
    ]
    for home, level in zip(rows[::2], rows[1::2], strict=True):
        assert level["worst_share"] < 2**-6 and "--exchange-choices" in level["command"]
        assert sum(level["rows_per_rank"]) == sum(home["rows_per_rank"])
        assert max(level["rows_per_rank"]) < max(home["rows_per_rank"])


@needs_gloo
@pytest.mark.parametrize("exchange", [False, True])
def test_the_balancer_is_told_whether_to_exchange(tmp_path, monkeypatch, exchange):
    told = []
    balancer = ep_ranks.WaterfillBalancer
    monkeypatch.setattr(
        ep_ranks, "WaterfillBalancer", lambda *a, **k: told.append(k) or balancer(*a, **k)
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    job = job_of(
        providers=(WATERFILL,),
        waterfill_mode="exact_restricted",
        dynamic=True,
        exchange_choices=exchange,
    )
    with ep_ranks.joined(job, 0, f"file://{tmp_path}/store"), torch.no_grad():
        rank = ep_ranks.Rank(job, dist.group.WORLD, torch.device("cpu"))
        assert rank.measure(5)[0].worst_share < 2**-6
    assert {options["max_tokens_per_rank"] for options in told} == {5 if exchange else None}


def job_of(**changes):
    fields = {
        "case": "tiny",
        "tokens": (5,),
        "ranks": 1,
        "device": "cpu",
        "backend": "gloo",
        "skew": 1.0,
        "providers": (OURS, SEPARATE),
        "waterfill_mode": "exact",
        "dynamic": False,
        "exchange_choices": False,
        "rounds": 1,
    }
    return Job(**fields | changes)


@needs_gloo
def test_what_differs_from_the_oracle_is_not_timed(tmp_path, monkeypatch):
    """The oracle without the shared expert: as far off as a provider that forgot it."""
    oracle = ep_layer.EpLayer.oracle
    timed = []
    monkeypatch.setattr(ep_ranks.Rank, "time", lambda self, calls: timed.extend(calls) or {})
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with ep_ranks.joined(job_of(), 0, f"file://{tmp_path}/store"), torch.no_grad():
        rank = ep_ranks.Rank(job_of(), dist.group.WORLD, torch.device("cpu"))
        right = rank.measure(5)
        assert timed == [OURS, SEPARATE] and all(m.worst_share < 2**-6 for m in right)
        timed.clear()
        monkeypatch.setattr(
            ep_layer.EpLayer,
            "oracle",
            lambda self, x, topk: oracle(self, x, topk) - self._one(32, x),
        )
        wrong = rank.measure(5)
        assert timed == [] and all(m.timing is None and m.worst_share > 0.1 for m in wrong)


def test_the_oracle_is_a_plain_loop_too():
    layer = ep_layer.EpLayer(ep_layer.CASES["tiny"], torch.device("cpu"), 1.0)
    x = layer.tokens(0, 3)
    choice = layer.gate()(x)
    for t, want in enumerate(layer.oracle(x, choice)):
        total = torch.zeros(256, dtype=torch.float64)
        pairs = zip(choice.topk_ids[t], choice.topk_weights[t], strict=True)
        slots = [(int(e), 2.5 * float(w)) for e, w in pairs]
        for number, weight in [*slots, (32, 1.0)]:
            up, down = layer.expert(number)
            gate, linear = (up.double() @ x[t].double()).split(64)
            total += weight * (down.double() @ (gate / (1 + torch.exp(-gate)) * linear))
        torch.testing.assert_close(want, total, rtol=1e-12, atol=1e-12)


def test_a_wrong_provider_makes_the_run_fail(monkeypatch, caplog, tmp_path):
    good = Measured(OURS, 5, Timing(1.0, 1.0, 1.0, 1), 0.001, [7], [2])
    bad = Measured(SEPARATE, 5, None, 0.5, [7], [2])
    monkeypatch.setattr(ep, "start", lambda job: [good, bad])
    path = tmp_path / "ep.json"
    words = ("--device", "cpu", "--ranks", "1", "--tokens", "5", "--json", str(path))
    assert ep.run(parse(*words)) == 1
    text = "not timed: separate shared experts, 1 ranks, 5 tokens: a row is off by 0.5 of its norm"
    assert text in caplog.text
    assert [row["provider"] for row in json.loads(path.read_text())] == [OURS]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cases", "gpt-9"], "--cases: expected some of tiny, deepseek-v3, .*got 'gpt-9'"),
        (["--ranks", "3"], "--ranks: expected a divisor of the 32 experts of tiny, got 3"),
        (["--ranks", "0"], "--ranks: expected 1 or more, got 0"),
        (["--tokens", "0"], "--tokens: expected 1 or more, got 0"),
        (["--rounds", "0"], "--rounds: expected 1 or more, got 0"),
        (
            ["--providers", "tornado"],
            "--providers: expected some of sgl_moe_jit, sep.*tornado",
        ),
        (["--dynamic"], "--dynamic: expected --enable-waterfill with it"),
        (["--waterfill-mode", "sampled"], "--waterfill-mode: expected --enable-waterfill with it"),
        (["--exchange-choices"], "--exchange-choices: expected --enable-waterfill with it"),
        (
            ["--enable-waterfill", "--exchange-choices"],
            "--exchange-choices: expected --dynamic with it",
        ),
        (
            ["--enable-waterfill", "--dynamic", "--exchange-choices"],
            "expected --waterfill-mode exact_restricted with it, got exact, the default",
        ),
        (
            ["--enable-waterfill", "--dynamic", "--exchange-choices", "--waterfill-mode=sampled"],
            "expected --waterfill-mode exact_restricted with it, got sampled",
        ),
        (
            ["--simulate", "--exchange-choices"],
            "--exchange-choices: means nothing to bench ep --simulate",
        ),
        (["--backend", "nccl"], "--backend: expected gloo on CPUs, got nccl"),
        (["--plot", "x"], "--plot: means nothing to bench ep without --simulate; leave it out"),
        (["--trace", "x"], "--trace: means nothing to bench ep without --simulate; leave it out"),
        (["--skew", "nan"], "--skew: expected a finite number, got nan"),
        (["--modes", "hot"], "--modes: means nothing to bench ep without --simulate"),
        (["--simulate", "--fixed-size"], "--fixed-size: means nothing to bench ep --simulate"),
        (["--simulate", "--rounds", "3"], "--rounds: means nothing to bench ep --simulate"),
    ],
)
def test_each_wrong_argument_is_named(words, text):
    with pytest.raises(ValueError, match=text):
        ep.run(parse("--device", "cpu", *words) if "--simulate" not in words else parse(*words))


def test_other_subjects_have_none_of_these_arguments():
    parser = argparse.ArgumentParser()
    command.configure(parser)
    arguments = parser.parse_args(["cpu", "--enable-waterfill"])
    text = "--enable-waterfill: means nothing to bench cpu; leave it out"
    with pytest.raises(ValueError, match=text):
        command.run(arguments)


@pytest.mark.parametrize(
    ("gpus", "words", "expected"),
    [
        (0, [], [("cpu", "gloo", 2), ("cpu", "gloo", 4)]),
        (1, ["--ranks", "1,2"], [("cuda", "nccl", 1), ("cuda", "gloo", 2)]),
        (4, [], [("cuda", "nccl", 2), ("cuda", "nccl", 4)]),
        (4, ["--backend", "gloo", "--ranks", "4"], [("cuda", "gloo", 4)]),
        (4, ["--device", "cpu", "--ranks", "8"], [("cpu", "gloo", 8)]),
    ],
)
def test_where_the_ranks_run(monkeypatch, gpus, words, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    jobs = ep_job.jobs_of(parse(*words))
    assert [(job.device, job.backend, job.ranks) for job in jobs] == expected
    assert jobs[0].case == ("tiny" if jobs[0].device == "cpu" else "deepseek-v3")


def test_more_ranks_than_gpus_over_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--backend: expected gloo for 2 ranks on 1 GPUs"):
        ep_job.jobs_of(parse("--ranks", "2", "--backend", "nccl"))
    with pytest.raises(ValueError, match="--fixed-size: expected nccl or CPUs"):
        ep_job.jobs_of(parse("--ranks", "2", "--fixed-size"))


def test_under_torchrun_the_ranks_are_given(monkeypatch):
    monkeypatch.setitem(os.environ, "RANK", "1")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "8")
    assert [job.ranks for job in ep_job.jobs_of(parse("--device", "cpu"))] == [8]
    with pytest.raises(ValueError, match=r"--ranks: expected 8, as torchrun started, got \(2,\)"):
        ep_job.jobs_of(parse("--device", "cpu", "--ranks", "2"))


def test_zero_is_a_number_given():
    """0 == False: what is refused, and what a record says it was made with."""
    with pytest.raises(ValueError, match="--seed: means nothing to bench ep without --simulate"):
        ep.run(parse("--seed", "0"))
    with pytest.raises(ValueError, match="--skew: means nothing to bench ep --simulate"):
        ep.run(parse("--simulate", "--skew", "0"))
    assert ep_job.command_line(parse("--skew", "0")).endswith(" ep --skew 0.0")


def test_help_names_every_routing_and_mode(capsys):
    simulate = pytest.importorskip("sgl_moe_jit.bench.ep_simulate_routing")
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert f"--routing {','.join(simulate.ROUTINGS)}" in text
    assert f"--waterfill-mode {{{','.join(MIN_TOKENS)}}}" in text


@pytest.mark.parametrize("text", ["a", "2,,4", ""])
def test_a_list_that_is_none_is_refused_in_words(capsys, text):
    with pytest.raises(SystemExit):
        parse("--ranks", text)
    said = f"--ranks: expected integers with commas between them, got {text!r}"
    assert said in capsys.readouterr().err
