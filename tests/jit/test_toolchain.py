# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Compilers: wrappers, CUDA_HOME, pip wheels, and what the messages say."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_moe_jit.errors import ToolchainError
from sgl_moe_jit.jit import CudaArch, build, load_jit, make_spec, toolchain
from tests.jit.helpers import (
    WATCH_CHILDREN,
    fake_nvcc,
    fake_toolkit,
    needs_nvcc,
    run_child,
    write_add_sources,
    write_script,
)

REAL_PIP_ROOTS = toolchain.pip_roots
ARCH = CudaArch.parse("9.0a")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with no compiler at all."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "pip_roots", lambda: iter(()))
    monkeypatch.setattr(toolchain, "_DEFAULT_ROOT", tmp_path / "default")
    return tmp_path


def add_cuda_module(folder, name="add-cuda"):
    sources = write_add_sources(folder, folder)
    return load_jit(
        name,
        cuda_files=[sources["add.cu"]],
        cpp_files=[sources["add_binding.cc"]],
        extra_include_paths=[folder],
        arch=ARCH,
    )


@needs_nvcc
@pytest.mark.field_report("J43")
def test_a_wrapper_first_on_path_builds_links_and_loads(monkeypatch, tmp_path):
    real = toolchain.locate_nvcc().path
    wrapper = write_script(tmp_path / "bin" / "nvcc", f'exec {real} "$@"')
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    toolkit = toolchain.require_cuda_toolkit()
    assert (toolkit.nvcc, toolkit.how) == (wrapper, "PATH")
    assert (toolkit.include / "cuda_runtime.h").is_file()
    assert toolkit.cudart_path.exists()
    assert toolkit.real_nvcc.resolve() != wrapper.resolve()
    assert add_cuda_module(tmp_path).add(41) == 42


@pytest.mark.field_report("J43")
def test_a_wrapper_is_asked_for_its_toolkit(bare):
    real = fake_toolkit(bare / "real")
    fake_nvcc(real / "bin" / "nvcc", real)
    fake_nvcc(bare / "bin" / "nvcc", real)
    found = toolchain.require_cuda_toolkit()
    assert (found.root, found.nvcc) == (real, bare / "bin" / "nvcc")
    assert found.real_nvcc == real / "bin" / "nvcc"


@pytest.mark.field_report("J43")
@pytest.mark.parametrize("top", [None, "empty"])
def test_a_wrapper_without_a_whole_toolkit_is_named(bare, top):
    fake_nvcc(bare / "bin" / "nvcc", bare / top if top else None)
    with pytest.raises(ToolchainError) as info:
        toolchain.require_cuda_toolkit()
    assert str(bare / "bin" / "nvcc") in str(info.value)
    assert ("include/cuda_runtime.h" if top else "exit status 3") in str(info.value)


@pytest.mark.parametrize(
    ("include", "lib", "argument"),
    [
        ("include", "lib64/libcudart.so", "-lcudart"),  # the installer
        ("include", "lib/libcudart.so.13", "-l:libcudart.so.13"),  # pip wheels
        ("targets/x86_64-linux/include", "targets/x86_64-linux/lib/libcudart.so", "-lcudart"),
    ],
    ids=["system", "pip", "conda"],
)
def test_each_layout_of_a_toolkit_is_known(bare, monkeypatch, include, lib, argument):
    root = fake_toolkit(bare / "toolkit", include, lib)
    fake_nvcc(root / "bin" / "nvcc", root)
    monkeypatch.setenv("CUDA_HOME", str(root))
    found = toolchain.require_cuda_toolkit()
    assert (found.root, found.include, found.version) == (root, root / include, (13, 0))
    assert (found.cudart, found.cudart_path, found.how) == (argument, root / lib, "CUDA_HOME")


def test_pip_wheels_are_found_without_importing_them(bare, monkeypatch):
    for name in ("cu12", "cu13"):
        root = fake_toolkit(bare / "site" / "nvidia" / name)
        fake_nvcc(root / "bin" / "nvcc", root)
    monkeypatch.setattr(sys, "path", [str(bare / "site")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr(toolchain, "pip_roots", REAL_PIP_ROOTS)
    found = toolchain.require_cuda_toolkit()
    assert (found.how, found.root) == ("pip", bare / "site" / "nvidia" / "cu13")
    assert "nvidia" not in sys.modules


def test_cuda_home_comes_before_path(bare, monkeypatch):
    for name in ("home", "path"):
        fake_nvcc(fake_toolkit(bare / name) / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(bare / "path" / "bin"))
    assert toolchain.require_cuda_toolkit().root == bare / "path"
    monkeypatch.setenv("CUDA_HOME", str(bare / "home"))
    assert toolchain.require_cuda_toolkit().root == bare / "home"


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_wrong_variable_is_an_error_and_not_passed_over(bare, monkeypatch, name):
    fake_nvcc(fake_toolkit(bare / "good") / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(bare / "good" / "bin"))
    monkeypatch.setenv(name, str(bare / "gone"))
    with pytest.raises(ToolchainError, match=f"{name}=.*gone.*expected bin/nvcc"):
        toolchain.require_cuda_toolkit()


def test_a_toolkit_without_a_runtime_library_lists_the_folders(bare, monkeypatch):
    root = fake_toolkit(bare / "toolkit", lib="lib/other.so")
    fake_nvcc(root / "bin" / "nvcc", root)
    monkeypatch.setenv("CUDA_HOME", str(root))
    with pytest.raises(ToolchainError, match=r"no libcudart\.so or libcudart\.so\.13 in: .*lib64"):
        toolchain.require_cuda_toolkit()


@pytest.mark.field_report("J14")
def test_nothing_found_is_one_error_that_lists_every_place(bare):
    (bare / "f.cu").touch()
    spec = make_spec(("f",), cuda_files=[bare / "f.cu"], arch=ARCH)
    with pytest.raises(ToolchainError) as info:
        build.find_tools(spec)
    text = str(info.value)
    for part in (
        "CUDA_HOME: not set",
        "CUDA_PATH: not set",
        "PATH: no nvcc",
        "nvidia/cu*/bin",
        "nvidia/cuda_nvcc/bin",
        str(bare / "default"),
        "sgl-moe-jit[nvcc]",
        "no C++ compiler found",
        "apt-get install g++",
    ):
        assert part in text, text


def test_cxx_may_hold_words(bare, monkeypatch):
    compiler = write_script(bare / "bin" / "mycc", "exit 0")
    monkeypatch.setenv("CXX", "mycc -m64")
    found = toolchain.require_host_compiler()
    assert (found.argv, found.path, found.how) == (("mycc", "-m64"), compiler, "CXX")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("mycc -isystem {dir}", ("-isystem", "{dir}")),
        ("mycc -include {dir}/other", ("-include", "{dir}/other")),
        ("ccache mycc -m64", ("-m64",)),
        ("{dir}/ccache distcc mycc", ()),
        ("env -u X LIMIT=3 mycc", ("-u", "X", "LIMIT=3")),
    ],
)
def test_the_compiler_is_the_first_program_after_launchers(bare, monkeypatch, text, flags):
    for name in ("mycc", "other", "ccache", "distcc", "env"):
        write_script(bare / "bin" / name, "exit 0")
    monkeypatch.setenv("CXX", text.format(dir=bare / "bin"))
    found = toolchain.require_host_compiler()
    assert found.path == bare / "bin" / "mycc"
    assert found.flags == tuple(flag.format(dir=bare / "bin") for flag in flags)


@pytest.mark.parametrize("text", ["gone++", "gone++ -include {bin}/mycc", "ccache", 'mycc "oops'])
def test_a_wrong_cxx_is_named(bare, monkeypatch, text):
    for name in ("mycc", "ccache"):
        write_script(bare / "bin" / name, "exit 0")
    monkeypatch.setenv("CXX", text.format(bin=bare / "bin"))
    with pytest.raises(ToolchainError, match=rf"CXX: expected a .*, got '{text.split()[0]}"):
        toolchain.require_host_compiler()


def test_cxx_reaches_nvcc(bare, monkeypatch):
    write_script(bare / "bin" / "mycc", "exit 0")
    monkeypatch.setenv("CXX", "mycc")
    root = fake_toolkit(bare / "toolkit")
    fake_nvcc(root / "bin" / "nvcc", root)
    monkeypatch.setenv("CUDA_HOME", str(root))
    tools = build.Tools(toolchain.require_host_compiler(), toolchain.require_cuda_toolkit())
    assert tools.fill(("{nvcc}", "-c")) == [
        str(root / "bin" / "nvcc"),
        f"-ccbin={bare / 'bin' / 'mycc'}",
        "-c",
    ]


def test_looking_starts_no_process(bare, monkeypatch):
    fake_nvcc(bare / "bin" / "nvcc")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert toolchain.locate_nvcc().path == bare / "bin" / "nvcc"
    assert toolchain.locate_host_compiler() is None


PIP_NVCC = next((r / "bin" / "nvcc" for r in toolchain.pip_roots()), Path("/nonexistent"))


@pytest.mark.skipif(not PIP_NVCC.is_file(), reason="needs sgl-moe-jit[nvcc]: nvcc from PyPI")
def test_the_real_wheels_build_link_and_load(tmp_path):
    write_add_sources(tmp_path, tmp_path)
    code = f"""{WATCH_CHILDREN}
from pathlib import Path
from sgl_moe_jit.jit import load_jit, toolchain
toolchain._DEFAULT_ROOT = Path("/nonexistent")
folder = Path({str(tmp_path)!r})
module = load_jit("pip-wheels", cuda_files=[folder / "add.cu"], arch="9.0a",
                  cpp_files=[folder / "add_binding.cc"], extra_include_paths=[folder])
result = [toolchain.require_cuda_toolkit().how, module.add(1)]
"""
    path = os.pathsep.join(
        p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "nvcc").exists()
    )
    env = {"PATH": path, "CUDA_HOME": "", "CUDA_PATH": ""}
    assert run_child(code, env)[0] == ["pip", 2]
