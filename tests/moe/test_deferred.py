# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The request to defer, the un-finalized rows, and what finishes either answer."""

import asyncio
import contextvars
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl_moe_jit import (
    DeferredFinalizeOutput,
    ExpertWeights,
    StandardTopKOutput,
    create_runner,
    deferred_finalize_context,
    finalize_output,
    is_deferred_finalize_enabled,
)
from sgl_moe_jit.moe import deferred

field_report = pytest.mark.field_report
H, WIDTH, E, K, T = 32, 16, 4, 2, 5


def make_runner():
    up, down = torch.randn(E, 2 * WIDTH, H) / 6, torch.randn(E, H, WIDTH) / 4

    def activation(x):
        gate, value = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * value

    return create_runner("native", ExpertWeights(up, down, activation))


def make_call(factor=1.0):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    return torch.randn(T, H), StandardTopKOutput(torch.rand(T, K), ids, factor)


def handle(factor=2.5):
    x, topk = make_call(factor)
    output = make_runner().run(x, topk, defer=True)
    assert isinstance(output, DeferredFinalizeOutput)
    return output


def test_nested_contexts_restore_the_outer_request():
    assert not is_deferred_finalize_enabled()
    with deferred_finalize_context():
        assert is_deferred_finalize_enabled()
        with deferred_finalize_context(enabled=False):
            assert not is_deferred_finalize_enabled()
            with deferred_finalize_context():
                assert is_deferred_finalize_enabled()
        assert is_deferred_finalize_enabled()
    assert not is_deferred_finalize_enabled()


def test_an_exception_restores_it_too():
    with pytest.raises(KeyError), deferred_finalize_context():
        raise KeyError
    assert not is_deferred_finalize_enabled()


def test_one_context_object_may_be_entered_twice():
    context = deferred_finalize_context()
    with context, context:
        assert is_deferred_finalize_enabled()
    assert not is_deferred_finalize_enabled()


def test_the_switch_turns_every_context_off(monkeypatch):
    runner, (x, topk) = make_runner(), make_call(2.5)
    shared = torch.full((T, H), 1e3)
    with deferred_finalize_context():
        on = runner.run(x, topk)
        assert isinstance(on, DeferredFinalizeOutput)
        monkeypatch.setenv("SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE", "0")
        assert not is_deferred_finalize_enabled()
        off = runner.run(x, topk)
    assert isinstance(off, torch.Tensor)
    # float32: one rounding a term and one for the sum, at 1e3 a unit is 2^-14
    difference = (finalize_output(on, shared) - finalize_output(off, shared)).abs().max()
    assert difference <= 2**-13


@field_report("C1")
def test_a_generator_finished_by_another_thread_hides_no_exception():
    def generator():
        with deferred_finalize_context():
            yield is_deferred_finalize_enabled()

    suspended = generator()
    assert next(suspended) is True
    failures = []

    def close_elsewhere():
        try:
            with pytest.raises(ZeroDivisionError):
                suspended.throw(ZeroDivisionError("the real one"))
            assert not is_deferred_finalize_enabled()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=close_elsewhere)
    thread.start()
    thread.join()
    assert not failures
    # Documented: until it went on, its caller ran with the request; an own context withdraws it.
    with deferred_finalize_context(enabled=False):
        assert not is_deferred_finalize_enabled()


@pytest.fixture(autouse=True)
def clean_context():
    """A suspended generator leaves its request behind in this context; do not hand it on."""
    yield
    deferred._requests.set(())


@field_report("C3")
def test_threads_start_without_the_request_and_still_give_the_right_answer():
    runner, (x, topk) = make_runner(), make_call()
    with ThreadPoolExecutor(1) as pool, deferred_finalize_context():
        here = runner.run(x, topk)
        there = pool.submit(runner.run, x, topk).result()
        carried = pool.submit(contextvars.copy_context().run, runner.run, x, topk).result()
    assert isinstance(here, DeferredFinalizeOutput)
    assert isinstance(there, torch.Tensor)
    assert isinstance(carried, DeferredFinalizeOutput)
    torch.testing.assert_close(there, finalize_output(here), rtol=2**-20, atol=2**-20)


@field_report("C3")
def test_one_context_object_shared_by_tasks_and_threads():
    shared = deferred_finalize_context()

    async def task(delay):
        with shared:
            await asyncio.sleep(delay)
            inside = is_deferred_finalize_enabled()
        return inside, is_deferred_finalize_enabled()

    async def main():
        return await asyncio.gather(task(0.01), task(0.02), task(0.03))

    assert asyncio.run(main()) == [(True, False)] * 3
    barrier = threading.Barrier(2)

    def thread(_):
        with shared:
            barrier.wait()
        barrier.wait()
        return is_deferred_finalize_enabled()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(thread, range(2))) == [False, False]


@field_report("C3")
def test_asyncio_tasks_do_not_affect_each_other():
    async def inside(entered, release):
        with deferred_finalize_context():
            entered.set()
            await release.wait()
            return is_deferred_finalize_enabled()

    async def outside(entered, release):
        await entered.wait()
        seen = is_deferred_finalize_enabled()
        release.set()
        return seen

    async def main():
        entered, release = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(inside(entered, release), outside(entered, release))

    assert asyncio.run(main()) == [True, False]


def test_the_handle_cannot_pass_for_a_tensor():
    output = handle()
    x = torch.ones(T, H)
    for use in (
        lambda: output + x,
        lambda: x + output,
        lambda: torch.add(x, output),
        lambda: torch.nn.functional.linear(output, x),
    ):
        with pytest.raises(TypeError):
            use()
    with pytest.raises(TypeError, match=r"not a tensor; call \.finalize\(\) first"):
        torch.add(x, output)
    for name in ("clone", "contiguous", "shape", "dtype", "view"):
        with pytest.raises(AttributeError, match=r"call \.finalize\(\) first"):
            getattr(output, name)


@field_report("C11")
def test_finishing_twice_gives_the_same_result_and_changes_nothing():
    output = handle()
    shared = torch.randn(T, H)
    first = output.finalize(shared)
    assert torch.equal(first, output.finalize(shared))
    assert torch.equal(first, copy.copy(output).finalize(shared))
    out = torch.empty(T, H)
    assert output.finalize(shared, out=out) is out and torch.equal(out, first)


def test_the_handle_keeps_its_tensors_alive():
    output = handle()
    want = output.finalize()
    for _ in range(20):  # what was freed would be handed out again, and overwritten
        torch.full_like(output.gemm2_out, 93.0)
    assert torch.equal(output.finalize(), want)


@field_report("C7")
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_factor_is_applied_once_and_never_to_the_shared_output(factor):
    runner, (x, topk) = make_runner(), make_call(factor)
    plain = StandardTopKOutput(topk.topk_weights, topk.topk_ids)
    routed = runner.run(x, plain, defer=False).double()
    shared = torch.full((T, H), 1e3)
    for defer in (True, False):
        got = finalize_output(runner.run(x, topk, defer=defer), shared)
        assert ((got.double() - (factor * routed + 1e3)).abs() <= 2**-13).all()


def test_finalize_output_takes_a_finished_tensor():
    x, shared = torch.randn(3, 4), torch.randn(3, 4)
    assert finalize_output(x) is x
    assert torch.equal(finalize_output(x, shared), x + shared)
    with pytest.raises(TypeError, match=r"output: expected a Tensor or a Deferred.*, got tuple"):
        finalize_output((x, shared))


def test_finalize_output_does_not_broadcast():
    for shape in ((1, 4), (3, 1, 4), (4,)):
        with pytest.raises(ValueError, match=r"shared_output: expected \(3, 4\), got"):
            finalize_output(torch.ones(3, 4), torch.ones(shape))


def test_a_factor_that_is_a_tensor_is_refused():
    with pytest.raises(TypeError, match="routed_scaling_factor: expected a float, got Tensor"):
        StandardTopKOutput(torch.ones(1, 1), torch.zeros(1, 1).int(), torch.tensor(2.5))
