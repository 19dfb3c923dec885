# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""CUTLASS headers: where they are looked for, and that the import name ``cutlass`` never counts."""

from __future__ import annotations

import sys

import pytest

from sgl_moe_jit.errors import DependencyError
from sgl_moe_jit.jit import cache, dependencies, load_jit, make_spec
from tests.jit.helpers import needs_nvcc

ROUND_CU = """
#include <cutlass/numeric_conversion.h>
#include <cutlass/version.h>
float to_bf16(float x) {
  return cutlass::NumericConverter<cutlass::bfloat16_t, float>::convert(x);
}
int cutlass_major() { return CUTLASS_MAJOR; }
"""
ROUND_BINDING_CC = """
#include <tvm/ffi/function.h>
float to_bf16(float);
int cutlass_major();
static double to_bf16_(double x) { return to_bf16(x); }
static int64_t cutlass_major_() { return cutlass_major(); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(to_bf16, to_bf16_);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cutlass_major, cutlass_major_);
"""


def write_headers(root, version=(9, 8, 7)):
    folder = root / "include" / "cutlass"
    folder.mkdir(parents=True)
    (folder / "cutlass.h").touch()
    names = ("MAJOR", "MINOR", "PATCH")
    lines = [f"#define CUTLASS_{p} {v}" for p, v in zip(names, version, strict=True)]
    (folder / "version.h").write_text("\n".join(lines))
    return root


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    monkeypatch.setattr(dependencies, "package_dir", lambda name: None)


def test_the_shipped_dependency_is_found(monkeypatch):
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    found = dependencies.find_cutlass()
    assert found.provider == "nvidia-cutlass"
    assert int(found.version.split(".")[0]) >= 4
    assert (found.include_dirs[0] / "cutlass" / "cutlass.h").is_file()


def test_an_unrelated_package_called_cutlass_is_not_touched(monkeypatch, tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    assert dependencies.find_dependency("cutlass").provider == "nvidia-cutlass"
    assert "cutlass" not in sys.modules


def test_cutlass_path_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_PATH", str(write_headers(tmp_path)))
    found = dependencies.find_cutlass()
    assert (found.provider, found.version) == ("CUTLASS_PATH", "9.8.7")


def test_a_wrong_cutlass_path_is_an_error_and_not_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_PATH", str(tmp_path))
    with pytest.raises(
        DependencyError, match=r"CUTLASS_PATH=.*expected include/cutlass/cutlass\.h"
    ):
        dependencies.find_cutlass()


def test_the_copy_inside_flashinfer_is_found_and_can_be_asked_for(monkeypatch, tmp_path):
    write_headers(tmp_path / "flashinfer" / "data" / "cutlass")
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    real = dependencies.package_dir
    monkeypatch.setattr(
        dependencies,
        "package_dir",
        lambda name: tmp_path / "flashinfer" if name == "flashinfer" else real(name),
    )
    assert dependencies.find_dependency("cutlass:flashinfer").version == "9.8.7"
    assert dependencies.find_dependency("cutlass:nvidia-cutlass").version != "9.8.7"


def test_nothing_found_lists_the_places_and_the_right_package(no_packages):
    with pytest.raises(DependencyError) as info:
        dependencies.find_cutlass()
    for part in ("CUTLASS_PATH", "nvidia-cutlass", "flashinfer", "pip install nvidia-cutlass"):
        assert part in str(info.value)


@pytest.mark.parametrize("name", ["torch", "cutlass:pip", ""])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="cutlass"):
        dependencies.find_dependency(name)


PROVIDERS = [
    pytest.param(
        provider,
        marks=pytest.mark.skipif(
            dependencies.package_dir(package) is None, reason=f"needs the package {provider}"
        ),
    )
    for provider, package in (("nvidia-cutlass", "cutlass_library"), ("flashinfer", "flashinfer"))
]


@needs_nvcc
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_cuda_source_builds_with_cutlass(tmp_path, provider):
    (tmp_path / "round.cu").write_text(ROUND_CU)
    (tmp_path / "binding.cc").write_text(ROUND_BINDING_CC)
    module = load_jit(
        "with-cutlass",
        cuda_files=[tmp_path / "round.cu"],
        cpp_files=[tmp_path / "binding.cc"],
        extra_dependencies=[f"cutlass:{provider}"],
        arch="9.0a",
    )
    assert module.to_bf16(1.0 + 2.0**-9) == 1.0  # bfloat16 keeps 8 bits
    expected = dependencies.find_cutlass(provider).version.split(".")[0]
    assert module.cutlass_major() == int(expected)


def test_each_provider_has_its_own_key(monkeypatch, tmp_path):
    source = tmp_path / "f.cc"
    source.touch()

    def key(provider):
        return cache.key_of(
            make_spec(("f",), cpp_files=[source], extra_dependencies=[f"cutlass:{provider}"])
        )

    monkeypatch.setenv("CUTLASS_PATH", str(write_headers(tmp_path / "mine")))
    assert key("CUTLASS_PATH") != key("nvidia-cutlass")
