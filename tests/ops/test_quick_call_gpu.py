# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The extension for eager calls on a GPU: bits, streams, graphs, memory and errors as without it.

test_finalize_quick_gpu.py holds what the quick way owes in general, by whichever way it goes.
"""

import sys
import threading
from dataclasses import replace

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.ops import finalize_kernel, quick_call
from tests.ops.finalize_cases import BF16, F16, F32, assert_same_bits, make
from tests.ops.quick_call_cases import (
    QUICK_FUNCTION,
    STRANGE,
    address_of,
    need_extension,
    outcome,
    served,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def guess():
    """A call whose module served last for its top_k."""
    need_extension()
    inputs = make(6, 8, 256, device="cuda", factor=2.5)
    inputs.run()
    return inputs


@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, None])
@pytest.mark.parametrize("gate", [None, F32, BF16])
@pytest.mark.parametrize("top_k", [8, 5])
def test_the_same_bits_as_without_it(weight_dtype, gate, top_k):
    need_extension()
    i = make(
        *(9, top_k, 264),
        padded=280,
        device="cuda",
        weight_dtype=weight_dtype,
        gate=gate,
        factor=2.5,
    )
    with quick_call.in_python():
        want = i.run()
    got = served(i)
    assert type(got) is torch.Tensor and got.is_contiguous() and got.device == want.device
    assert_same_bits(got, want)
    assert_same_bits(served(i, enable_pdl=False), want)
    out = torch.empty(9, 300, device="cuda", dtype=BF16)[:, :264]
    assert served(i, out=out) is out
    assert_same_bits(out, want)
    unshared = replace(i, shared=None, gate=None, hidden_dim=264)
    with quick_call.in_python():
        want = unshared.run()
    assert_same_bits(served(unshared), want)


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("gate", [None, F32])
def test_every_dtype_is_served(dtype, gate):
    need_extension()
    i = make(6, 8, 256, device="cuda", dtype=dtype, gate=gate)
    with quick_call.in_python():
        want = i.run()
        assert_same_bits(i.run(), want)
    assert_same_bits(served(i), want)
    assert served(replace(i, shared=torch._neg_view(i.shared))) is None


def test_another_module_declines(guess):
    for dtype in (F16, F32):
        other = make(6, 8, 256, device="cuda", dtype=dtype)
        out = torch.full_like(other.shared, 7)
        assert served(other) is None and served(other, out=out) is None
        assert (out == 7).all()
    assert served(make(6, 8, 256, device="cuda", weight_dtype=None)) is None
    assert served(guess) is not None


@pytest.mark.parametrize("name", STRANGE)
def test_what_it_does_not_serve_ends_as_without_it(name, guess):
    i = make(6, 8, 256, device="cuda", gate=F32)
    i.run()
    field, change = STRANGE[name]
    i = replace(i, **{field: change(getattr(i, field))})
    assert served(i) is None
    out = torch.full((6, 256), 7.0, dtype=BF16, device="cuda")
    assert served(i, out=out) is None
    assert out._version == 0 and (out == 7).all()
    errors = [outcome(i.run), outcome(lambda: i.run(out=out))]
    with quick_call.in_python():
        assert [outcome(i.run), outcome(lambda: i.run(out=out))] == errors


def test_tensors_of_two_devices_end_as_without_it(guess):
    for field in ("idx", "weights", "shared", "gemm2_out"):
        i = replace(guess, **{field: getattr(guess, field).cpu()})
        error = outcome(i.run)
        assert served(i) is None and error is not None
        with quick_call.in_python():
            assert outcome(i.run) == error
    host = torch.empty(6, 256, dtype=BF16)
    assert served(guess, out=host) is None and outcome(lambda: guess.run(out=host)) is not None


def test_switches_are_seen_by_the_next_call(guess, monkeypatch):
    flags = []

    def decline(call):
        flags.append((call.contents.flags, call.contents.stream))
        return False

    function = QUICK_FUNCTION(decline)
    kernel = finalize_kernel.Kernel(None, None, address_of(function))
    monkeypatch.setitem(finalize_kernel.LAST_KERNEL, 8, kernel)
    served(guess)
    monkeypatch.setenv(env.PDL.name, "0")
    served(guess)
    monkeypatch.setenv(env.VECTOR.name, "off")
    served(guess)
    monkeypatch.setenv(env.PDL.name, "1")
    served(guess)
    served(guess, enable_pdl=False)
    assert [f for f, _ in flags] == [3, 2, 0, 1, 0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        served(guess)
    assert (flags[0][1] or 0) == torch.cuda.current_stream().cuda_stream
    assert flags[-1][1] == side.cuda_stream


def test_work_is_queued_on_the_current_stream(guess):
    want = guess.run()
    out = torch.empty_like(want)
    late = guess.gemm2_out.clone()
    source = late.clone()
    late.zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        i = replace(guess, gemm2_out=late)
        new = served(i)  # before the copy, if it went to another stream
        assert served(i, out=out) is out
    side.synchronize()
    assert_same_bits(new, want)
    assert_same_bits(out, want)


@pytest.mark.parametrize("way", ["C", "Python", "dispatcher"])
def test_another_streams_reads_are_waited_for(way, guess):
    """``record_stream`` is a no-op on memory that is not known to be torch's."""

    def call():
        if way == "C":
            return served(guess)
        if way == "dispatcher":
            return replace(guess, shared=guess.shared.requires_grad_()).run().detach()
        with quick_call.in_python():
            return guess.run()

    out = call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        copy = out.clone()
    out.record_stream(side)
    address = out.data_ptr()
    with torch.no_grad():
        want = guess.run(out=torch.empty_like(out))
    del out
    again = [call() for _ in range(3)]
    assert address not in [x.data_ptr() for x in again]
    torch.cuda.synchronize()
    assert_same_bits(copy, want)


def test_a_graph_captures_it(guess):
    want = guess.run()
    out = torch.empty_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = served(guess)
        assert new is not None and served(guess, out=out) is out
    for _ in range(2):
        out.zero_()
        new.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, want)
        assert_same_bits(new, want)


def test_outputs_come_from_torchs_allocator_and_go_back(guess):
    new = served(guess)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = [served(guess) for _ in range(50)]
    assert torch.cuda.memory_allocated() - before >= 50 * new.nbytes
    del made
    assert torch.cuda.memory_allocated() == before
    pool = torch.cuda.memory_stats()["allocation.all.allocated"]
    served(guess)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == pool + 1
    wrong = replace(guess, weights=guess.weights[:, :7])
    for _ in range(20):
        assert served(wrong) is None
    assert torch.cuda.memory_allocated() == before


def test_writes_bump_the_version_and_inference_tensors_are_guarded(guess):
    out = torch.empty_like(guess.shared)
    assert served(guess, out=out) is out and out._version == 1
    assert guess.run(out=out)._version == 2
    with torch.inference_mode():
        frozen = torch.empty_like(out)
        assert served(guess, out=frozen) is frozen and served(guess).is_inference()
    assert served(guess, out=frozen) is None
    with pytest.raises(RuntimeError, match="out: an inference tensor"):
        guess.run(out=frozen)


def test_no_references_are_lost_or_kept(guess):
    out = torch.empty_like(guess.shared)
    everything = (guess.gemm2_out, guess.idx, guess.weights, guess.shared, out, None)
    for _ in range(100):
        served(guess), served(guess, out=out)
    torch.cuda.synchronize()
    before = [sys.getrefcount(x) for x in everything]
    memory = torch.cuda.memory_allocated()
    for _ in range(100):
        for _ in range(100):
            served(guess), served(guess, out=out)
        torch.cuda.synchronize()
    after = [sys.getrefcount(x) for x in everything]
    assert all(abs(b - a) < 20 for a, b in zip(before, after, strict=True)), (before, after)
    assert torch.cuda.memory_allocated() == memory


def test_threads_on_streams_of_their_own(guess):
    inputs = [make(64, 8, 512, device="cuda", seed=seed) for seed in range(4)]
    want = [i.run() for i in inputs]
    wrong = []
    torch.cuda.synchronize()

    def work(i, expected):
        with torch.cuda.stream(torch.cuda.Stream()):
            got = [served(i) for _ in range(100)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(g for g in got if not torch.equal(g.view(torch.int16), expected))

    threads = [
        threading.Thread(target=work, args=(i, w.view(torch.int16)))
        for i, w in zip(inputs, want, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
