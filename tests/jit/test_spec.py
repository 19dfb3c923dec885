# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What is to be built: refusals, command lines without machine paths, generated wrappers."""

from __future__ import annotations

import os
import tempfile

import pytest

from sgl_moe_jit import env
from sgl_moe_jit.jit import CudaArch, load_jit, make_spec, paths
from tests.jit.helpers import write_add_sources

ARCH = CudaArch.parse("9.0a")


@pytest.fixture
def sources(tmp_path):
    return write_add_sources(tmp_path / "src", tmp_path / "inc")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"name": ()}, ValueError, "name: expected"),
        ({"name": ("", "x")}, ValueError, "name: expected"),
        ({"cpp_files": []}, ValueError, "expected at least one source"),
        ({"cuda_files": ["moe/finalize.cu"]}, ValueError, "arch: expected a CUDA target"),
        ({"cpp_files": ["no/such.cc"]}, FileNotFoundError, r"cpp_files\[0\]: no/such.cc is in"),
        ({"cpp_files": ["/no/such.cc"]}, FileNotFoundError, r"cpp_files\[0\]: no such file"),
        ({"extra_include_paths": ["/no/such"]}, FileNotFoundError, r"extra_include_paths\[0\]"),
        ({"extra_dependencies": ["torch"]}, ValueError, "extra_dependencies: expected 'cutlass'"),
        ({"header_only": True}, ValueError, "header_only: expected True exactly when"),
        ({"cuda_wrappers": [("f", "f")]}, ValueError, "cuda_wrappers: expected the header"),
        ({"cpp_wrappers": [("f-g", "f")]}, ValueError, "expected a C identifier"),
        ({"extra_cflags": ["-O2", "@/x"]}, ValueError, r"extra_cflags\[1\]: .*'@/x'"),
        ({"extra_ldflags": ["-Wl,-s,@/x"]}, ValueError, r"extra_ldflags\[0\]: .*@/x"),
        ({"extra_cuda_cflags": ["-Xlinker=@/x"]}, ValueError, r"extra_cuda_cflags\[0\]: .*@/x"),
        ({"extra_cflags": ["-O2", 3]}, TypeError, r"extra_cflags\[1\]: expected a string, got 3"),
    ],
)
def test_refusals_name_the_argument(sources, arguments, error, match):
    call = {"name": ("add",), "cpp_files": [sources["add.cc"]], **arguments}
    with pytest.raises(error, match=match):
        make_spec(call.pop("name"), **call)


@pytest.mark.parametrize(
    "name",
    [
        *("cuda_files", "cpp_files", "extra_cflags", "extra_cuda_cflags", "extra_ldflags"),
        *("extra_include_paths", "extra_dependencies"),
    ],
)
def test_one_string_is_not_taken_letter_by_letter(sources, name):
    match = rf"{name}: expected a list of strings, got '-DX'"
    with pytest.raises(TypeError, match=match):
        load_jit("add", **{"cpp_files": [sources["add.cc"]], name: "-DX"})


def test_flags_that_only_hold_an_at_sign_are_passed_on(sources):
    flags = ["-DMAIL=a@b", "-DX=a,@b"]
    spec = make_spec(("add",), cpp_files=[sources["add.cc"]], extra_cflags=flags)
    assert set(flags) <= set(spec.units[0].command)


def test_command_lines_hold_no_path_of_this_machine(sources, tmp_path):
    spec = make_spec(
        ("add",),
        cuda_files=[sources["add.cu"]],
        cpp_files=[sources["add_binding.cc"]],
        extra_include_paths=[tmp_path / "inc"],
        extra_dependencies=["cutlass"],
        arch=ARCH,
    )
    words = [word for unit in spec.units for word in unit.command] + list(spec.link)
    assert not [word for word in words if "/" in word and "roots/" not in word]
    assert dict(spec.roots)["extra0"] == tmp_path / "inc"
    assert [unit.stem for unit in spec.units] == ["cuda0", "cpp0"]
    assert spec.units[0].command[0] == "{nvcc}"
    assert spec.units[1].command[0] == "{cxx}"


def test_shipped_sources_are_named_from_csrc_and_include():
    spec = make_spec(("x",), cpp_files=["moe/finalize_cpu.cc"])
    assert spec.units[0].source == "roots/csrc/moe/finalize_cpu.cc"
    spec = make_spec(("x",), cpp_files=["sgl_moe_jit/tvm_ffi_utils.h"], cpp_wrappers=[("f", "f")])
    assert '#include "roots/include/sgl_moe_jit/tvm_ffi_utils.h"' in spec.units[0].text


def test_wrappers_share_one_generated_source(sources):
    spec = make_spec(
        ("x",),
        cuda_files=[sources["outer.h"], sources["inner.h"]],
        cuda_wrappers=[("first", "ns::f<1>"), ("second", "ns::f<2>")],
        arch=ARCH,
    )
    (unit,) = spec.units
    assert unit.source == "cuda_wrappers.cu"
    assert "TVM_FFI_DLL_EXPORT_TYPED_FUNC(first, (ns::f<1>));" in unit.text
    assert unit.text.count("#include") == 3


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (("a/b", "..", "c d"), "a_b-..-c_d"),
        (("..",), "_."),  # cannot leave the cache folder
        ((".staging",), "_staging"),  # cannot be taken for the cache's own folder
        (("x" * 300,), "x" * 100),  # the whole name is in the key
    ],
)
def test_the_label_is_safe_as_a_file_name(sources, name, label):
    assert make_spec(name, cpp_files=[sources["add.cc"]]).label == label


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SGL_MOE_JIT_CACHE_DIR": "/c"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/sgl_moe_jit"),
        ({"HOME": "{tmp}"}, "{tmp}/.cache/sgl_moe_jit"),
        ({"HOME": "/"}, "{tmp}/sgl_moe_jit-{uid}"),
        ({"HOME": "/no/such/home"}, "{tmp}/sgl_moe_jit-{uid}"),
    ],
)
def test_the_cache_folder(monkeypatch, tmp_path, variables, expected):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    for name in (env.CACHE_DIR.name, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert str(paths.cache_root()) == expected.format(tmp=tmp_path, uid=os.getuid())
    assert list(tmp_path.iterdir()) == []  # asking makes nothing


def test_a_shared_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("HOME", "/")
    for name in (env.CACHE_DIR.name, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    other = os.getuid() + 1
    (tmp_path / f"sgl_moe_jit-{other}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(PermissionError, match="belongs to another user; set SGL_MOE_JIT_CACHE_DIR"):
        paths.cache_root()
