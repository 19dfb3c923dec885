# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA targets: what parses, what is refused, what a device gets."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.jit import CudaArch, arch_of_capability, current_arch


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("9.0", "sm_90"),
        ("9.0a", "sm_90a"),
        (" 90a ", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("compute_100f", "sm_100f"),
        ("10.0a", "sm_100a"),
        ("120f", "sm_120f"),
        ("8.6", "sm_86"),
    ],
)
def test_parse(text, name):
    arch = CudaArch.parse(text)
    assert arch.name == name
    assert CudaArch.parse(arch.name) == arch
    number = name.removeprefix("sm_")
    assert arch.gencode() == f"-gencode=arch=compute_{number},code=sm_{number}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "9", "9.0b", "9.0+PTX", "9.0;10.0", "sm_9.0.1", "hopper", "7.5", "sm_70", "8.0a"),
        *("9.0f", "9.9", "8.1", "sm_99", "13.0"),
    ],
)
def test_what_is_no_target_is_refused_by_name(text):
    with pytest.raises(ValueError, match="CUDA target") as info:
        CudaArch.parse(text)
    assert repr(text) in str(info.value)


def test_the_targets_that_exist_are_listed():
    for number in (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121):
        assert CudaArch.parse(f"sm_{number}").name == f"sm_{number}"
    with pytest.raises(ValueError, match=r"expected one of 8\.0, 8\.6, .*12\.1, got '9\.9'"):
        CudaArch.parse("9.9")


@pytest.mark.parametrize(
    ("capability", "name", "pdl"),
    [
        ((8, 0), "sm_80", False),
        ((8, 9), "sm_89", False),
        ((9, 0), "sm_90a", True),
        ((10, 0), "sm_100a", True),
        ((10, 3), "sm_103a", True),
        ((12, 0), "sm_120f", True),
        ((12, 1), "sm_121f", True),
        ((13, 0), "sm_130", True),
    ],
)
def test_the_target_of_a_device(capability, name, pdl):
    arch = arch_of_capability(*capability)
    assert (arch.name, arch.supports_pdl) == (name, pdl)


def test_an_old_device_is_refused():
    with pytest.raises(ValueError, match=r"8\.0 or newer, got 7\.5"):
        arch_of_capability(7, 5)


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv("SGL_MOE_JIT_CUDA_ARCH", "10.0a")
    assert current_arch().name == "sm_100a"


def test_without_a_device_the_error_names_the_variable(monkeypatch):
    monkeypatch.delenv("SGL_MOE_JIT_CUDA_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="SGL_MOE_JIT_CUDA_ARCH"):
        current_arch()


@pytest.mark.gpu
def test_the_current_device_has_a_target(monkeypatch):
    monkeypatch.delenv("SGL_MOE_JIT_CUDA_ARCH", raising=False)
    assert (current_arch().major, current_arch().minor) == torch.cuda.get_device_capability()
