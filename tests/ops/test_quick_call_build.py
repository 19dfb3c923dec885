# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Building the extension for eager calls: when, from what cache, and that calls need it not."""

import logging
import sys
import sysconfig

import pytest

from sgl_moe_jit import env
from sgl_moe_jit.bench import doctor
from sgl_moe_jit.jit import cache
from sgl_moe_jit.ops import finalize, finalize_kernel, quick_call
from tests.ops.finalize_cases import assert_same_bits, make
from tests.ops.quick_call_cases import need_extension


@pytest.fixture
def unloaded(monkeypatch):
    """As in a new process: nothing loaded, calls in Python."""
    for way in quick_call._ways:
        monkeypatch.setattr(way, "call", way.in_python)
        monkeypatch.setattr(way, "compiled", None)
    quick_call._extension.cache_clear()
    finalize_kernel._cpu_kernel.cache_clear()
    yield
    quick_call._extension.cache_clear()


@pytest.fixture
def no_headers(monkeypatch, tmp_path):
    """A Python without its headers."""
    real = sysconfig.get_path

    def get_path(name, *rest, **named):
        return str(tmp_path / "none") if name == "include" else real(name, *rest, **named)

    monkeypatch.setattr(sysconfig, "get_path", get_path)


def test_the_first_kernel_brings_it(unloaded):
    if quick_call.why_in_python() is not None:
        pytest.skip(quick_call.why_in_python())
    assert finalize._QUICK.call is finalize._quick_in_python
    i = make(3, 4, 16)
    want = i.run()
    assert finalize._QUICK.call is finalize._QUICK.compiled is not None
    assert_same_bits(i.run(), want)
    assert quick_call._MODULE not in sys.modules


def test_one_loaded_while_it_is_left_out_serves_afterwards(unloaded):
    need_extension()
    quick_call._extension.cache_clear()
    for way in quick_call._ways:
        way.call, way.compiled = way.in_python, None
    finalize_kernel._cpu_kernel.cache_clear()
    i = make(3, 4, 16)
    with quick_call.in_python():
        with quick_call.in_python():
            i.run()
            assert finalize._QUICK.compiled is not None
        assert finalize._QUICK.call is finalize._quick_in_python
    assert finalize._QUICK.call is finalize._QUICK.compiled


def test_an_op_that_comes_late_is_served_too(monkeypatch):
    need_extension()
    monkeypatch.setattr(quick_call, "_ways", [])
    late = quick_call.QuickWay(quick_call.never, "Tio", ({}, {}, {}), 1)
    assert late.call is late.compiled is not None


@pytest.mark.parametrize(
    ("prevent", "reason"),
    [
        (lambda m: m.setenv(env.QUICK_CALL.name, "0"), f"{env.QUICK_CALL.name} is off"),
        (lambda m: m.setenv("CXX", "/nonexistent"), "ToolchainError: quick_call is to be"),
        (lambda m: m.setattr(quick_call, "_MODULE", "no_such"), "LoadError: quick_call: the built"),
        (lambda m: m.setattr(sys.implementation, "name", "pypy"), "written for CPython, this is"),
        (
            lambda m: m.setattr(
                sysconfig, "get_config_var", lambda name: {"Py_GIL_DISABLED": 1}.get(name)
            ),
            "written for a Python with a global lock",
        ),
        (None, "needs Python's headers"),
    ],
    ids=["off", "no compiler", "not loadable", "pypy", "free-threaded", "no headers"],
)
def test_calls_work_without_it(unloaded, prevent, reason, monkeypatch, tmp_path, request, caplog):
    i = make(3, 4, 16)
    want = i.run()
    quick_call._extension.cache_clear()
    finalize_kernel._cpu_kernel()  # the kernel itself is loaded
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
    for way in quick_call._ways:
        way.call, way.compiled = way.in_python, None
    if prevent is None:
        request.getfixturevalue("no_headers")
    else:
        prevent(monkeypatch)
    with caplog.at_level(logging.INFO, "sgl_moe_jit.ops"):
        compiled, why = quick_call.state()
    assert not compiled and why.startswith(reason) and "\n" not in why, why
    assert f"eager calls stay in Python: {reason}" in caplog.text
    assert finalize._QUICK.call is finalize._quick_in_python
    assert_same_bits(i.run(), want)
    if prevent is None:
        feature = doctor.examine().features[-1]
        assert (feature.name, feature.ok) == ("eager calls in C", False)
        assert feature.mend == "apt-get install python3-dev"


def test_nonsense_in_the_switch_is_told_by_the_first_call(unloaded, monkeypatch):
    monkeypatch.setenv(env.QUICK_CALL.name, "perhaps")
    with pytest.raises(ValueError, match=f"{env.QUICK_CALL.name}: expected one of 1/0"):
        make(3, 4, 16).run()


def test_a_cached_one_needs_neither_headers_nor_compiler(unloaded, monkeypatch, request):
    need_extension()  # it is in the cache from here on
    quick_call._extension.cache_clear()
    request.getfixturevalue("no_headers")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    assert quick_call.state() == (True, "")


def test_the_key_names_the_python(monkeypatch):
    spec = quick_call.extension_spec()
    key = cache.key_of(spec)
    abi = sysconfig.get_config_var("SOABI")
    assert f"-DSMJ_PYTHON_ABI={abi}" in spec.units[0].command
    real = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: "cpython-399" if name == "SOABI" else real(name)
    )
    assert cache.key_of(quick_call.extension_spec()) != key
