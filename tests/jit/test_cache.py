# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The cache: what is a hit, what is stale, what is damaged; all in one process, with C++ only."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess

import pytest

from sgl_moe_jit.errors import ToolchainError
from sgl_moe_jit.jit import cache, load_jit, make_spec, manifest
from tests.jit.helpers import write_add_sources, write_script

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.fixture
def load(tmp_path):
    sources = write_add_sources(tmp_path / "src", tmp_path / "inc")

    def call(**arguments):
        return load_jit(
            "add",
            cpp_files=[sources["add.cc"]],
            extra_include_paths=[tmp_path / "inc"],
            **arguments,
        )

    return call


def leaves(cache_dir):
    return sorted(cache_dir.glob("add/*/*"))


def test_a_hit_starts_no_process_and_changes_no_file(load, builds, monkeypatch, cache_dir):
    assert load().add(1) == 2
    before = {p: p.stat().st_mtime_ns for p in cache_dir.rglob("*")}
    monkeypatch.setattr(subprocess, "Popen", None)
    assert load().add(1) == 2
    assert len(builds) == 1
    assert {p: p.stat().st_mtime_ns for p in cache_dir.rglob("*")} == before


def test_a_leaf_holds_the_module_and_its_manifest_and_nothing_is_left_over(load, cache_dir):
    load()
    (leaf,) = leaves(cache_dir)
    assert sorted(path.name for path in leaf.iterdir()) == ["manifest.json", "module.so"]
    assert not list((cache_dir / ".staging").iterdir())
    record = json.loads((leaf / "manifest.json").read_text())
    assert "roots/extra0/inner.h" in record["files"]  # a header of a header
    assert None not in record["files"].values()


@pytest.mark.field_report("J8")
def test_a_changed_macro_is_a_different_module_and_both_stay_usable(load, builds, cache_dir):
    plain, bonus = load(), load(extra_cflags=["-DBONUS=100"])
    assert (plain.add(1), bonus.add(1)) == (2, 102)
    assert (load().add(1), load(extra_cflags=["-DBONUS=100"]).add(1)) == (2, 102)
    assert len(builds) == len(leaves(cache_dir)) == 2


@pytest.mark.field_report("J8")
def test_a_header_edit_is_seen_and_going_back_is_a_hit(load, builds, tmp_path):
    inner = tmp_path / "inc" / "inner.h"
    stat, text = inner.stat(), inner.read_text()
    assert load().add(1) == 2
    inner.write_text(text.replace("STEP 1", "STEP 5"))
    os.utime(inner, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load().add(1) == 6
    inner.write_text(text)
    assert load().add(1) == 2
    assert len(builds) == 2


def test_the_systems_headers_count_where_a_compiler_could_use_them(
    load, builds, monkeypatch, tmp_path
):
    header = tmp_path / "system" / "extra.h"
    header.parent.mkdir()
    header.write_text("#define BONUS 20\n")
    # By its full name, as the compiler reports its own headers.
    flags = [f"-I{header.parent}", "-include", "extra.h"]
    assert load(extra_cflags=flags).add(1) == 22
    header.write_text("#define BONUS 30\n")
    with monkeypatch.context() as slim:  # an image without compilers has not their headers either
        slim.delenv("CXX", raising=False)
        slim.setenv("PATH", str(tmp_path / "nothing"))
        assert load(extra_cflags=flags).add(1) == 22
    assert load(extra_cflags=flags).add(1) == 32
    assert len(builds) == 2


def key_of(tmp_path, **arguments):
    source = tmp_path / "f.cc"
    source.touch()
    return cache.key_of(make_spec(("f",), cpp_files=[source], **arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"extra_cflags": ["-DX"]},
        {"extra_ldflags": ["-lm"]},
        {"extra_include_paths": ["/usr"]},
        {"extra_dependencies": ["cutlass"]},
        {"cpp_wrappers": [("f", "f")]},
    ],
    ids=str,
)
def test_each_argument_reaches_the_key(tmp_path, arguments):
    assert key_of(tmp_path, **arguments) != key_of(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["CPATH", "COMPILER_PATH", "GCC_EXEC_PREFIX", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"],
)
def test_variables_that_compilers_read_reach_the_key(tmp_path, monkeypatch, name):
    before = key_of(tmp_path)
    monkeypatch.setenv(name, "-DX")
    assert key_of(tmp_path) != before


@pytest.mark.parametrize("what", ["torch", "cuda", "tvm_ffi", "os", "machine", "libc", "cxx11_abi"])
def test_the_environment_reaches_the_key(tmp_path, monkeypatch, what):
    before = key_of(tmp_path)
    real = manifest.environment()
    monkeypatch.setattr(manifest, "environment", lambda: {**real, what: "other"})
    assert key_of(tmp_path) != before


def test_flags_inside_cxx_are_not_passed_over(load, builds, monkeypatch):
    load()
    monkeypatch.setenv("CXX", "g++ -DBONUS=7")
    assert load().add(1) == 9
    monkeypatch.delenv("CXX")
    assert load().add(1) == 2
    assert len(builds) == 2


def test_another_compiler_rebuilds_and_both_modules_stay(load, builds, monkeypatch, tmp_path):
    load()
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "mycc", 'exec g++ "$@"')))
    load()
    load()
    monkeypatch.delenv("CXX")
    load()
    assert len(builds) == 2


def replace(path, data):
    # A new file: this process has the old one mapped, and would die of a change in place.
    path.unlink()
    path.write_bytes(data)


def truncate(leaf):
    data = (leaf / "module.so").read_bytes()
    replace(leaf / "module.so", data[: len(data) // 2])


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lambda leaf: replace(leaf / "module.so", b"<html>proxy error</html>"),
        lambda leaf: (leaf / "module.so").unlink(),
        lambda leaf: (leaf / "manifest.json").write_text("{"),
        lambda leaf: (leaf / "manifest.json").write_text("[]"),
        lambda leaf: (leaf / "manifest.json").write_bytes(b"\xff\x00"),
        lambda leaf: (leaf / "manifest.json").unlink(),
    ],
    ids=["truncated", "text", "no module", "cut", "other json", "binary", "no manifest"],
)
def test_a_damaged_entry_is_rebuilt_once_with_a_warning(load, builds, caplog, cache_dir, damage):
    load()
    (leaf,) = leaves(cache_dir)
    damage(leaf)
    assert load().add(1) == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(leaf) in warnings[0]
    assert load().add(1) == 2
    assert builds == ["add", "add"]
    assert leaves(cache_dir) == [leaf]


def test_an_entry_that_does_not_load_is_kept_when_it_cannot_be_rebuilt(
    load, monkeypatch, cache_dir, tmp_path
):
    load()
    (leaf,) = leaves(cache_dir)
    # As a missing shared library would: the file is the published one, and does not load.
    replace(leaf / "module.so", b"not a library")
    record = json.loads((leaf / "manifest.json").read_text())
    record["module"] = manifest.file_digest(leaf / "module.so")
    (leaf / "manifest.json").write_text(json.dumps(record))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler"):
        load()
    assert leaves(cache_dir) == [leaf]


def test_a_cache_that_cannot_be_written_costs_the_caching_and_not_the_build(
    load, builds, caplog, monkeypatch, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert load().add(1) == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "could not be cached" in warning
    assert builds == ["add"]


def test_losing_the_race_to_publish_is_winning(load, monkeypatch, cache_dir):
    real = cache.publish

    def publish_twice(build, key, leaf, staging):
        twin = staging.with_name("twin")
        shutil.copytree(staging, twin, symlinks=True)
        first = (twin / "module.so").stat().st_ino
        assert real(build, key, leaf, twin).stat().st_ino == first  # renamed, not copied
        module = real(build, key, leaf, staging)
        assert module.stat().st_ino == first  # what was published stays
        return module

    monkeypatch.setattr(cache, "publish", publish_twice)
    assert load().add(1) == 2
    assert len(leaves(cache_dir)) == 1
    assert not list((cache_dir / ".staging").iterdir())


def test_header_only_functions_are_exported(tmp_path):
    (tmp_path / "math.h").write_text(
        "#pragma once\n#include <cstdint>\n"
        "template <int N> int64_t times(int64_t x) { return N * x; }\n"
    )
    module = load_jit(
        "wrapped",
        cpp_files=[tmp_path / "math.h"],
        cpp_wrappers=[("double_it", "times<2>"), ("triple_it", "times<3>")],
    )
    assert (module.double_it(7), module.triple_it(7)) == (14, 21)
    (tmp_path / "math.h").write_text((tmp_path / "math.h").read_text().replace("N * x", "N + x"))
    module = load_jit(
        "wrapped",
        cpp_files=[tmp_path / "math.h"],
        cpp_wrappers=[("double_it", "times<2>"), ("triple_it", "times<3>")],
    )
    assert module.double_it(7) == 9
