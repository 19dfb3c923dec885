# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""cache_once: typed keys, one computation a key, failures, forks, tracing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl_moe_jit.jit import cache_once

Point = namedtuple("Point", "x y")


def counted():
    calls = []

    @cache_once
    def f(x, y=0):
        calls.append((x, y))
        return object()

    return f, calls


@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0, "1", b"1"),
        (0, False, 0.0, -0.0, None, ""),
        ((1,), (True,), (1.0,)),
        (((1, 2), 3), ((1, 2.0), 3), ((True, 2), 3)),
        ((0.0,), (-0.0,)),
        ((1, 2), Point(1, 2)),
        (frozenset({1}), frozenset({True}), frozenset({1.0})),
        (torch.float32, torch.bfloat16, "float32"),
    ],
    ids=str,
)
def test_equal_values_of_different_types_are_different_keys(values):
    f, calls = counted()
    results = [f(value) for value in values]
    assert len(set(map(id, results))) == len(calls) == len(values)
    assert [f(value) for value in values] == results
    assert f.cache_size() == len(values)


def test_nan_is_one_key():
    f, calls = counted()
    assert f(float("nan")) is f(float("nan"))
    assert len(calls) == 1


def test_each_spelling_of_a_call_is_one_key():
    f, calls = counted()
    results = [f(1), f(x=1), f(1, 0), f(1, y=0), f(y=0, x=1)]
    assert len(set(map(id, results))) == len(calls) == 1


def test_keyword_only_and_variadic_functions():
    calls = []

    @cache_once
    def f(*names, flag=False, **rest):
        calls.append((names, flag, rest))
        return len(calls)

    assert f("a") == f("a", flag=False) == 1
    assert f("a", flag=0) == 2  # 0 is not False
    assert f("a", b=1, c=2) == f("a", c=2, b=1) == 3


def test_clear_forgets_and_unhashable_arguments_are_refused():
    f, _ = counted()
    first = f(1)
    f.cache_clear()
    assert f.cache_size() == 0
    assert f(1) is not first
    with pytest.raises(TypeError, match="unhashable"):
        f([])


@pytest.mark.field_report("J34")
def test_sixteen_threads_compute_once():
    calls = []
    gate = threading.Barrier(16)

    @cache_once
    def build(name):
        calls.append(name)
        time.sleep(0.1)
        return object()

    def ask(_):
        gate.wait()
        return build("kernel")

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(ask, range(16)))
    assert calls == ["kernel"]
    assert len(set(map(id, results))) == 1


@pytest.mark.field_report("J34")
def test_different_keys_overlap_in_time():
    both_inside = threading.Barrier(2)

    @cache_once
    def build(name):
        both_inside.wait(timeout=20)  # BrokenBarrierError if the other cannot come in
        return name

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(build, ["a", "b"])) == ["a", "b"]


@pytest.mark.field_report("J34")
def test_a_failure_is_not_kept_and_leaves_no_waiter_hanging():
    attempts = []
    gate = threading.Barrier(8)

    @cache_once
    def build(name):
        attempts.append(name)
        time.sleep(0.05)
        if len(attempts) == 1:
            raise OSError("disk full")
        return "built"

    def ask(_):
        gate.wait()
        try:
            return build("kernel")
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        answers = [future.result(timeout=20) for future in [pool.submit(ask, i) for i in range(8)]]
    assert sorted(answers) == ["built"] * 7 + ["disk full"]
    assert len(attempts) == 2
    assert build("kernel") == "built"


def test_recursion_on_the_same_key_is_an_error_and_not_a_deadlock():
    @cache_once
    def build(name):
        return build(name)

    with pytest.raises(RuntimeError, match="called itself with the same arguments"):
        build("kernel")


def test_a_fork_during_a_computation_leaves_the_child_free():
    inside, leave = threading.Event(), threading.Event()

    @cache_once
    def build(name):
        inside.set()
        leave.wait(20)
        return name

    thread = threading.Thread(target=build, args=("kernel",))
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a held lock would hang here for ever
        leave.set()
        os._exit(0 if build("kernel") == "kernel" else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert status == 0, f"the child ended with wait status {status} (14: it hung)"


def test_under_torch_compile_the_result_is_a_constant():
    calls = []

    @cache_once
    def scale(n):
        calls.append(n)
        with threading.Lock():  # nothing Dynamo could trace into
            return n * 2

    def f(x):
        return x * scale(3)

    compiled = torch.compile(f, fullgraph=True, backend="eager")
    x = torch.ones(4)
    assert compiled(x).tolist() == [6.0] * 4
    assert compiled(x).tolist() == [6.0] * 4
    assert calls == [3]
    assert scale(3) == 6  # eager and traced calls share the result
    assert calls == [3]
