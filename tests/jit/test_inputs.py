# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a build reads besides sources and headers, and what changes while it runs."""

from __future__ import annotations

import logging
import os
import subprocess
import time

import pytest

from sgl_moe_jit.jit import build as building
from sgl_moe_jit.jit import cache, load_jit, manifest
from tests.jit.helpers import write_add_sources

USES_FOO = """
#include <tvm/ffi/function.h>
extern "C" int foo();
static int64_t call() { return foo(); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(call, call);
"""


pytestmark = pytest.mark.usefixtures("cache_dir")


def compile_foo(folder, value, *, shared=False):
    """Make foo.o and libfoo.a, or libfoo.so, all of a size and a time that tell nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "foo.cc").write_text(f'extern "C" int foo() {{ return {value}; }}\n')
    made = ["-shared", "-o", "libfoo.so"] if shared else ["-c", "-o", "foo.o"]
    subprocess.run(["g++", "-fPIC", "foo.cc", *made], cwd=folder, check=True)
    if not shared:
        subprocess.run(["ar", "rcsD", "libfoo.a", "foo.o"], cwd=folder, check=True)
    for path in folder.glob("*foo.*"):
        os.utime(path, (1, 1))


@pytest.fixture
def load_foo(tmp_path):
    (tmp_path / "use.cc").write_text(USES_FOO)

    def call(*ldflags):
        return load_jit("foo", cpp_files=[tmp_path / "use.cc"], extra_ldflags=ldflags).call()

    return call


@pytest.mark.field_report("J8")
@pytest.mark.parametrize(
    "flags", [["-L{dir}", "-lfoo"], ["{dir}/foo.o"]], ids=["archive", "object"]
)
def test_a_rebuilt_static_library_is_seen(load_foo, builds, tmp_path, monkeypatch, flags):
    lib = tmp_path / "a lib"
    flags = [flag.format(dir=lib) for flag in flags]
    compile_foo(lib, 1)
    assert (load_foo(*flags), load_foo(*flags), len(builds)) == (1, 1, 1)
    compile_foo(lib, 2)
    with monkeypatch.context() as slim:  # without a compiler nothing could be rebuilt
        slim.delenv("CXX", raising=False)
        slim.setenv("PATH", str(tmp_path / "nothing"))
        assert load_foo(*flags) == 1
    assert (load_foo(*flags), load_foo(*flags), len(builds)) == (2, 2, 2)
    compile_foo(lib, 1)
    assert (load_foo(*flags), len(builds)) == (1, 2)


def test_a_shared_library_is_compared_by_time_first_and_content_then(load_foo, builds, tmp_path):
    lib = tmp_path / "lib"
    flags = [f"-L{lib}", "-lfoo", f"-Wl,-rpath,{lib}"]
    compile_foo(lib, 1, shared=True)
    load_foo(*flags)
    (lib / "libfoo.so").touch()
    load_foo(*flags)
    assert len(builds) == 1, "only touched"
    data = (lib / "libfoo.so").read_bytes() + b"longer"
    (lib / "libfoo.so").unlink()  # this process has the old one mapped
    (lib / "libfoo.so").write_bytes(data)
    load_foo(*flags)
    assert len(builds) == 2


def test_a_file_that_a_flag_names_is_seen(load_foo, builds, tmp_path):
    compile_foo(tmp_path / "lib", 1)
    script = tmp_path / "map"
    script.write_text("{ global: *; };\n")
    flags = [str(tmp_path / "lib" / "foo.o"), f"-Wl,--version-script={script}"]
    load_foo(*flags)
    script.write_text("{ global: *; local: foo; };\n")
    load_foo(*flags)
    load_foo(*flags)
    assert len(builds) == 2


def test_a_hit_reads_no_library_of_the_system(load_foo, cache_dir, tmp_path, monkeypatch):
    compile_foo(tmp_path / "lib", 1)
    flags = [f"-L{tmp_path / 'lib'}", "-lfoo"]
    load_foo(*flags)
    read = []
    real = manifest.file_digest
    monkeypatch.setattr(manifest, "file_digest", lambda path: read.append(path) or real(path))
    load_foo(*flags)
    assert tmp_path / "lib" / "libfoo.a" in read
    assert [path for path in read if ".so" in path.name] == [*cache_dir.glob("foo/*/*/module.so")]


def test_what_a_linker_traces(tmp_path):
    for name in ("roots/x/libfoo.so", "foo.a", "odd(1)", "cpp0.o"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    lines = [
        "cpp0.o",
        f"{tmp_path}/foo.a(x.o)",
        f"{tmp_path}/foo.a(y.o)",
        "roots/x/libfoo.so",
        f"{tmp_path}/odd(1)",
        f"{tmp_path}/gone.ltrans0.o",
        f"({tmp_path}/foo.a)x.o",
        "/usr/bin/ld: mode elf_x86_64",
    ]
    found = building.parse_trace("\n".join(lines), tmp_path)
    assert found == [f"{tmp_path}/foo.a", "roots/x/libfoo.so", f"{tmp_path}/odd(1)"]


def test_a_header_edited_during_the_build_is_not_recorded_as_built(
    builds, cache_dir, caplog, tmp_path, monkeypatch
):
    sources = write_add_sources(tmp_path, tmp_path)
    inner = tmp_path / "inner.h"
    text, stat = inner.read_text(), inner.stat()
    real = building.run_build

    def load():
        return load_jit("add", cpp_files=[sources["add.cc"]], extra_include_paths=[tmp_path])

    def edited_after_it_was_read(*arguments):
        result = real(*arguments)
        inner.write_text(text.replace("STEP 1", "STEP 5"))
        os.utime(inner, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return result

    with monkeypatch.context() as editing:
        editing.setattr(building, "run_build", edited_after_it_was_read)
        assert load().add(1) == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning == f"add is not cached: {inner} changed while it was built"
    assert not list(cache_dir.glob("add/*/*")) and not list((cache_dir / ".staging").iterdir())
    assert (load().add(1), load().add(1), len(builds)) == (6, 6, 2)


def test_an_edit_just_before_a_build_is_told_from_one_during_it(tmp_path):
    # Twenty times, since the clock that stamps files ticks only every few milliseconds.
    for i in range(20):
        before, folder, after = (tmp_path / f"{name}{i}" for name in ("before", "folder", "after"))
        before.touch()
        folder.mkdir()
        started = building._start_clock(folder)
        after.touch()
        assert before.stat().st_ctime_ns <= started < after.stat().st_ctime_ns


def test_a_header_from_the_future_is_cached_all_the_same(builds, tmp_path):
    sources = write_add_sources(tmp_path, tmp_path)
    os.utime(tmp_path / "inner.h", (2**32, 2**32))
    for _ in range(2):
        load_jit("add", cpp_files=[sources["add.cc"]], extra_include_paths=[tmp_path])
    assert len(builds) == 1


def test_what_killed_builds_left_is_removed_after_a_day(cache_dir, tmp_path, caplog):
    root = cache_dir / ".staging"
    now = time.time()
    for name, age_h in (("old", 25), ("young", 23), ("others", 25), ("target", 25)):
        (root / name).mkdir(parents=True)
        (root / name / "cpp0.o").touch()
        os.utime(root / name, (now - age_h * 3600,) * 2)
    (root / "target").rename(tmp_path / "target")
    (root / "link").symlink_to(tmp_path / "target")
    if os.getuid() == 0:
        os.chown(root / "others", 12345, 12345)
        os.utime(root / "others", (now - 25 * 3600,) * 2)
    new = cache.new_staging()
    left = {path.name for path in root.iterdir()}
    assert left - {"others"} == {"young", "link", new.name}
    assert ("others" in left) == (os.getuid() == 0)
    assert (tmp_path / "target" / "cpp0.o").exists()
    assert not caplog.records


def test_a_cxx_that_cannot_be_read_counts_as_none_on_a_hit(builds, tmp_path, monkeypatch):
    sources = write_add_sources(tmp_path, tmp_path)
    for cxx in ("g++", 'g++ "oops'):
        monkeypatch.setenv("CXX", cxx)
        module = load_jit("add", cpp_files=[sources["add.cc"]], extra_include_paths=[tmp_path])
        assert module.add(1) == 2
    assert len(builds) == 1


def test_a_file_the_linker_writes_is_no_input(builds, tmp_path):
    (tmp_path / "one.cc").write_text(
        "#include <tvm/ffi/function.h>\nstatic int64_t one() { return 1; }\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(one, one);\n"
    )
    (tmp_path / "out.map").write_text("from an earlier link")
    for _ in range(2):
        module = load_jit(
            "one",
            cpp_files=[tmp_path / "one.cc"],
            extra_ldflags=[f"-Wl,-Map={tmp_path}/out.map"],
        )
        assert module.one() == 1
    assert len(builds) == 1 and "earlier" not in (tmp_path / "out.map").read_text()


@pytest.mark.parametrize("wrappers", ["ab", ["ab"], [("a", 1)], [("a", "b", "c")], 3])
def test_wrappers_are_pairs(tmp_path, wrappers):
    (tmp_path / "k.h").write_text("")
    with pytest.raises(TypeError, match=r"cpp_wrappers.*: expected .*pair"):
        load_jit("k", cpp_files=[tmp_path / "k.h"], cpp_wrappers=wrappers)
