# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/prove.sh``: every benchmark that it starts is one that our parser takes."""

import argparse
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.bench import command, ep_job

ROOT = Path(__file__).parents[2]


@pytest.fixture
def calls(tmp_path):
    """The command lines of the step ``bench``, by log, of a Python that only writes them down."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{shlex.quote(str(tmp_path / "calls"))}\n')
    python.chmod(0o755)
    variables = {
        "OUT": str(tmp_path / "out"),
        "COMMIT": "abc",
        "PYTHON": str(python),
        "PEERS": "--peer sglang=A --peer flashinfer=B",
        "WATERFILL_PEER": "--peer sglang=C",
    }
    script = ["bash", "-u", str(ROOT / "benchmarks/prove.sh"), "bench"]
    done = subprocess.run(
        script, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.endswith("failed: nothing\n")
    parser = argparse.ArgumentParser()
    command.configure(parser)
    lines = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert all(words[:3] == ["-m", "sgl_moe_jit", "bench"] for words in lines)
    return [parser.parse_args(words[3:]) for words in lines]


def test_every_subject_is_measured_with_arguments_that_it_takes(calls, monkeypatch):
    on_gpus = {subject.name for subject in command.SUBJECTS if subject.devices[0] == "cuda"}
    assert {call.subject for call in calls} == {*on_gpus, "ep"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for call in calls:
        if call.subject == "ep":
            jobs = ep_job.jobs_of(call)
            assert call.peer is None and all(ep_job.WATERFILL in job.providers for job in jobs)
        else:
            command._refuse_unused(call)
        assert call.commit == "abc" and call.json.suffix == ".json"
    assert len({call.json for call in calls}) == len(calls)  # no result is written over


def test_waterfill_has_a_peer_of_its_own(calls):
    peers = {call.subject: call.peer for call in calls}
    assert peers["waterfill"] == ["sglang=C"]
    assert peers["norm"] == ["sglang=A", "flashinfer=B"]
