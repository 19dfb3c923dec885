# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One build: dependency lists, what a failure says, compilers that misbehave."""

from __future__ import annotations

import logging

import pytest

from sgl_moe_jit.errors import BuildError, LoadError
from sgl_moe_jit.jit import load_jit, parallel, paths
from sgl_moe_jit.jit.build import parse_depfile
from tests.jit.helpers import NASTY, needs_nvcc, write_add_sources, write_script

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.o: a.cc b.h\n", ["a.cc", "b.h"]),
        ("a.o: a.cc \\\n b.h \\\n  c.h\n", ["a.cc", "b.h", "c.h"]),
        ("cuda0.o : roots/a.cu \\\n    /usr/include/x.h \n", ["roots/a.cu", "/usr/include/x.h"]),
        ("a.o: a\\ b:c$$d'e/x.h\n", [f"{NASTY}/x.h"]),
        ("a.o: x\\#1.h\n", ["x#1.h"]),
        ("a\\ b:c.o: y.h\n", ["y.h"]),
        ("a.o:\n", []),
        ("", []),
    ],
)
@pytest.mark.field_report("J17")
def test_depfile(text, expected):
    assert parse_depfile(text) == expected


def failing_build(tmp_path, **arguments):
    with pytest.raises(BuildError) as info:
        load_jit("broken", **arguments)
    staging = paths.cache_root() / ".staging"
    assert not list(staging.iterdir())
    return str(info.value).splitlines()


def test_an_error_starts_with_file_line_and_reason(tmp_path):
    source = tmp_path / "broken.cc"
    source.write_text("int f() {\n  return missing_name;\n}\n")
    lines = failing_build(tmp_path, cpp_files=[source])
    assert lines[0].startswith(f"broken: {source}:2:")
    assert "error" in lines[0]
    assert "missing_name" in lines[0]
    assert lines[1].startswith("exit status 1: ")
    assert "-c roots/cpp_files0/broken.cc" in lines[1]


@needs_nvcc
def test_an_error_of_nvcc_too(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void f() {\n  missing_name();\n}\n")
    lines = failing_build(tmp_path, cuda_files=[source], arch="9.0a")
    assert lines[0].startswith(f"broken: {source}(2): error")


def test_an_error_of_the_link_names_the_symbol(tmp_path):
    source = tmp_path / "broken.cc"
    source.write_text("int gone();\nint f() { return gone(); }\n")
    assert "undefined reference to `gone()'" in failing_build(tmp_path, cpp_files=[source])[0]


@pytest.mark.parametrize(
    ("script", "first"),
    [
        ("kill -9 $$", "killed by signal 9 (out of memory?)"),
        ("kill -15 $$", "killed by signal 15"),
        (
            "echo 'ld: final link failed: No space left on device' >&2; exit 1",
            "no space left on the device of the cache or of the temporary folder; free some, or",
        ),
        ("exit 137", "killed by signal 9 (out of memory?)"),
        ("exit 0", "exited with 0 but left no cpp0.o"),
        ('while [ "$1" != -o ]; do shift; done; : > "$2"', "exited with 0 but left no cpp0.o"),
        ("exit 255", "the compiler failed"),
    ],
)
def test_a_compiler_that_dies_or_lies(monkeypatch, tmp_path, script, first):
    source = write_add_sources(tmp_path, tmp_path)["add.cc"]
    compiler = write_script(tmp_path / "mycc", script)
    monkeypatch.setenv("CXX", str(compiler))
    lines = failing_build(tmp_path, cpp_files=[source])
    assert first in lines[0]
    assert str(compiler) in "\n".join(lines)


def test_a_module_that_does_not_load_is_not_published(tmp_path):
    source = tmp_path / "bad.cc"
    source.write_text("#include <cstdlib>\nstatic int x = [] { throw 1; return 0; }();\n")
    source.write_text("extern int gone;\nint* f() { return &gone; }\n")
    with pytest.raises(LoadError, match="does-not-load: the built module does not load"):
        load_jit(
            "does-not-load",
            cpp_files=[source],
            extra_ldflags=["-Wl,--unresolved-symbols=ignore-all", "-Wl,-z,now"],
        )
    assert not (paths.cache_root() / "does-not-load").exists()


def test_a_start_line_and_an_end_line_and_none_on_a_hit(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="sgl_moe_jit")
    source = write_add_sources(tmp_path, tmp_path, step=71)["add.cc"]
    for _ in range(2):
        load_jit("lines", cpp_files=[source], extra_include_paths=[tmp_path])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages
    assert messages[0].startswith("building lines into ")
    assert messages[1].startswith("built lines in ")
    assert messages[1].endswith(" s")


def test_jobs_overlap_and_keep_their_order(monkeypatch):
    import threading

    monkeypatch.setenv("SGL_MOE_JIT_MAX_JOBS", "3")
    together = threading.Barrier(3)

    def job(n):
        together.wait(timeout=20)
        return n * n

    assert parallel.run_all(job, [1, 2, 3]) == [1, 4, 9]


def test_the_first_failure_is_raised_after_every_job_ended():
    ended = []

    def job(n):
        ended.append(n)
        if n:
            raise ValueError(n)

    with pytest.raises(ValueError, match="1"):
        parallel.run_all(job, [0, 1, 2])
    assert sorted(ended) == [0, 1, 2]
