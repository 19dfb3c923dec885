# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a fork asks of CUDA, and in which order a block uses it: streams that only keep a log."""

import contextlib
import subprocess
import sys
import types

import pytest
import torch

from sgl_moe_jit.moe import block as block_module
from sgl_moe_jit.moe import streams
from sgl_moe_jit.moe.block_gates import StreamFacts
from tests.moe.layer_cases import FakeRunner, logged_block
from tests.moe.runner_cases import make_input


class FakeStream:
    made = 0

    def __init__(self, device=0, name=None):
        FakeStream.made += 1
        self.name = name or f"alternate{FakeStream.made}"
        self.device = types.SimpleNamespace(index=device)

    def wait_stream(self, other):
        log.append(f"{self.name} waits for {other.name}")


log = []


@pytest.fixture
def cuda(monkeypatch):
    """A fake ``torch.cuda``: one main stream, a flag for capturing, a log."""
    log.clear()
    FakeStream.made = 0
    state = types.SimpleNamespace(current=FakeStream(name="main"), capturing=False)
    FakeStream.made = 0

    @contextlib.contextmanager
    def use(stream):
        before, state.current = state.current, stream
        log.append(f"on {stream.name}")
        try:
            yield
        finally:
            state.current = before
            log.append(f"on {before.name}")

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state.current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(streams, "_streams", streams._Streams())
    return state


class FakeTensor:
    def __init__(self, name):
        self.name = name

    def record_stream(self, stream):
        log.append(f"{self.name} kept for {stream.name}")


@pytest.mark.parametrize("capturing", [False, True])
def test_fork_and_join(cuda, capturing):
    cuda.capturing = capturing
    with streams.Fork(torch.device("cuda"), FakeTensor("x")) as fork:
        log.append("routed")
        with fork.alternate():
            log.append("shared")
    fork.hand_over(FakeTensor("s"), None)
    want = ["alternate1 waits for main", "x kept for alternate1", "routed", "on alternate1"]
    want += ["shared", "on main", "main waits for alternate1", "s kept for main"]
    assert log == [line for line in want if not (capturing and "kept" in line)]


@pytest.mark.parametrize("where", ["routed", "shared"])
def test_an_exception_joins_too(cuda, where):
    with pytest.raises(KeyError), streams.Fork(torch.device("cuda"), FakeTensor("x")) as fork:
        if where == "routed":
            raise KeyError
        with fork.alternate():
            raise KeyError
    assert log[-1] == "main waits for alternate1"
    assert cuda.current.name == "main"


def test_all_layers_share_one_stream_that_is_not_the_main_one(cuda):
    for _ in range(8):
        with streams.Fork(torch.device("cuda")):
            pass
    assert FakeStream.made == 1
    cuda.current = streams.alternate_stream(cuda.current)
    assert streams.alternate_stream(cuda.current).name == "alternate2"
    assert FakeStream.made == 2


@torch.no_grad()
@pytest.mark.parametrize("defer", [True, False])
def test_a_block_issues_the_routed_experts_first_and_finishes_after_the_join(
    cuda, monkeypatch, defer
):
    runner, x = FakeRunner(log), make_input(5)
    block = logged_block(runner)
    want = block.forward_normal(x, defer=defer)
    monkeypatch.setattr(
        block_module, "StreamFacts", lambda **facts: StreamFacts(**{**facts, "device": "cuda"})
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: log.append("kept"))
    finish = block_module.finish
    monkeypatch.setattr(
        block_module, "finish", lambda *a, **k: log.append("finish") or finish(*a, **k)
    )
    log.clear()
    assert torch.equal(block.forward_normal_dual_stream(x, defer=defer), want)
    assert log == [
        *["alternate1 waits for main", "kept", "gate", "topk", "routed"],
        *["on alternate1", "shared", "on main", "main waits for alternate1", "kept", "finish"],
    ]
    assert block.last_plan.dual_stream and block.last_plan.deferred is defer
    assert str(block.last_plan).startswith("forward_normal_dual_stream, 5 tokens: routed first")
    cuda.capturing = True  # what a block does by itself while a graph is captured
    log.clear()
    x.__class__ = type("OnCuda", (torch.Tensor,), {"is_cuda": True})
    assert torch.equal(block(x, defer=defer), want)
    assert "on alternate1" in log and "kept" not in log


def test_importing_makes_no_stream_and_starts_no_cuda():
    code = (
        "import torch, sgl_moe_jit.moe.block\n"
        "from sgl_moe_jit.moe import streams\n"
        "assert not torch.cuda.is_initialized() and not streams._streams.of_device"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
