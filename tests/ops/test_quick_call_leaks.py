# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The extension for eager calls leaves no reference, no memory and no second run behind."""

import ctypes
import gc
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.ops import finalize_kernel, quick_call
from tests.ops.finalize_cases import BF16, F32, make
from tests.ops.quick_call_cases import (
    MANAGED_DATA,
    QUICK_FUNCTION,
    DLTensor,
    address_of,
    need_extension,
    served,
)


@pytest.fixture(autouse=True)
def extension():
    need_extension()
    make(1, 4, 16).run()  # top 4 has a module from here on


def test_a_module_that_makes_an_output_and_declines_leaks_nothing(monkeypatch):
    i = make(5, 4, 16)
    shape = (ctypes.c_int64 * 2)(1024, 1024)
    allocated = []

    def decline(call):
        c = call.contents
        wanted = DLTensor.from_buffer_copy(c.values[3].tensor.contents)
        wanted.shape = shape
        made = ctypes.c_void_p()
        allocated.append(c.allocate(ctypes.byref(wanted), ctypes.byref(made), None, None))
        data = ctypes.c_void_p.from_address(made.value + MANAGED_DATA).value
        ctypes.memset(data, 1, 2 << 20)
        c.made[0] = made.value
        return False

    function = QUICK_FUNCTION(decline)
    kernel = finalize_kernel.Kernel(None, None, address_of(function))
    monkeypatch.setitem(finalize_kernel.LAST_CPU_KERNEL, 4, kernel)
    assert served(i) is None
    pages = _resident_pages()
    for _ in range(50):
        assert served(i) is None
    assert allocated == [0] * 51
    assert _resident_pages() - pages < 5000  # 20 MB of the 100 that were made


def test_a_served_call_is_not_repeated(monkeypatch):
    """An output may have been an input: a second run would read what the first one wrote."""
    calls = []
    function = QUICK_FUNCTION(lambda call: calls.append(1) is None)
    kernel = finalize_kernel.Kernel(None, None, address_of(function))
    monkeypatch.setitem(finalize_kernel.LAST_CPU_KERNEL, 4, kernel)
    with pytest.raises(RuntimeError, match="the kernel's module made no output"):
        make(5, 4, 16).run()
    assert calls == [1]


def test_no_references_are_lost_or_kept():
    i = make(5, 4, 16, gate=F32)
    out = torch.empty(5, 16, dtype=BF16)
    wrong = replace(i, weights=i.weights[:, :3])
    wants = replace(i, shared=i.shared.clone().requires_grad_())
    everything = (*vars(i).values(), out, None, True, wrong.weights, wants.shared, torch.Tensor)
    kernel = finalize_kernel.LAST_CPU_KERNEL[4]

    def rounds(number):
        for _ in range(number):
            served(i)
            served(i, out=out)
            served(wants)
        for _ in range(number // 100):  # an error inside costs a backtrace
            served(wrong)

    rounds(1000)
    gc.collect()
    before = [sys.getrefcount(x) for x in (*everything, kernel)]
    pages = _resident_pages()
    rounds(100_000)
    after = [sys.getrefcount(x) for x in (*everything, kernel)]
    assert all(abs(b - a) < 20 for a, b in zip(before, after, strict=True)), (before, after)
    assert _resident_pages() - pages < 2000  # 8 MB; a lost tensor a call would be 50 and more


def _resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_threads_call_at_once():
    inputs = [make(9, 4, 64, seed=seed) for seed in range(4)]
    with quick_call.in_python():
        want = [i.run() for i in inputs]
    wrong = []

    def work(i, expected):
        for _ in range(300):
            if not torch.equal(served(i).view(torch.int16), expected.view(torch.int16)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
