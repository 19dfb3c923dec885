# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The cache between processes: warm without compilers, edits seen, odd names, forks, races."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sgl_moe_jit.jit import toolchain
from tests.jit.helpers import (
    NASTY,
    REPO,
    WATCH_CHILDREN,
    needs_nvcc,
    path_with_only,
    run_child,
    write_add_sources,
)

HAS_NVCC = toolchain.locate_nvcc() is not None


def load_add(folder: Path, include: Path, *, cuda: bool, name: str = "add") -> str:
    """Return code that loads ``add`` as ``module``."""
    kind = 'cuda_files=[folder / "add.cu"], arch="9.0a", cpp_files=[folder / "add_binding.cc"]'
    return f"""
from pathlib import Path
from sgl_moe_jit.jit import load_jit
folder, include = Path({str(folder)!r}), Path({str(include)!r})
module = load_jit({name!r}, extra_include_paths=[include],
                  {kind if cuda else 'cpp_files=[folder / "add.cc"]'})
"""


# For a machine whose compilers stand where no variable can hide them.
HIDE_THE_REST = """
from pathlib import Path
from sgl_moe_jit.jit import toolchain
toolchain._DEFAULT_ROOT = Path("/nonexistent")
toolchain.pip_roots = lambda: iter(())
"""


@pytest.mark.field_report("J14")
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=needs_nvcc)], ids=["c++", "cuda"])
def test_a_warm_cache_needs_no_compiler_and_a_cold_one_says_what_is_missing(tmp_path, cuda):
    write_add_sources(tmp_path, tmp_path)
    cache = {"SGL_MOE_JIT_CACHE_DIR": str(tmp_path / "cache")}
    code = load_add(tmp_path, tmp_path, cuda=cuda)
    assert run_child(f"{code}\nresult = module.add(1)", cache)[0] == 2

    hidden = {
        **cache,
        "PATH": path_with_only(tmp_path / "bin", "sh", "ninja") if shutil.which("ninja") else "",
        "CUDA_HOME": "",
        "CUDA_PATH": "",
        "CXX": "",
    }
    result, _ = run_child(
        f"""{WATCH_CHILDREN}{HIDE_THE_REST}
import torch  # its own import may run ldconfig
del started[:]
if {cuda}:  # the runtime library is no compiler, and stays where it is
    toolchain.cuda_roots = lambda: [Path({str(cuda_root())!r})]
{code}
answer, before = module.add(1), list(started)
try:
    load_jit("cold", cpp_files=[folder / "add.cc"], extra_include_paths=[include])
except Exception as error:
    message = f"{{type(error).__name__}}: {{error}}"
result = [answer, before, started, message]
""",
        hidden,
    )
    answer, started_by_hit, started_by_miss, message = result
    assert (answer, started_by_hit, started_by_miss) == (2, [], [])
    assert message.startswith("ToolchainError: cold is to be compiled: no C++ compiler found")


def cuda_root() -> Path:
    return toolchain.require_cuda_toolkit().root if HAS_NVCC else Path("/nonexistent")


@pytest.mark.field_report("J8")
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=needs_nvcc)], ids=["c++", "cuda"])
def test_one_byte_in_a_header_of_a_header_is_seen_by_a_new_process(tmp_path, cuda):
    write_add_sources(tmp_path / "src", tmp_path / "inc")
    cache = {"SGL_MOE_JIT_CACHE_DIR": str(tmp_path / "cache")}
    code = load_add(tmp_path / "src", tmp_path / "inc", cuda=cuda) + "\nresult = module.add(1)"
    assert run_child(code, cache)[0] == 2
    inner = tmp_path / "inc" / "inner.h"
    stat = inner.stat()
    inner.write_text(inner.read_text().replace("STEP 1", "STEP 3"))
    os.utime(inner, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run_child(code, cache)[0] == 4


@pytest.mark.field_report("J17")
def test_folders_with_odd_names_build_hit_and_see_edits(tmp_path):
    package_root = tmp_path / "package" / NASTY
    for name in ("sgl_moe_jit", "csrc", "include"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / name, package_root / name, ignore=ignore)
    sources, includes = tmp_path / "src" / NASTY, tmp_path / "inc" / NASTY
    write_add_sources(sources, includes)
    (sources / "add.cc").write_text(
        '#include "sgl_moe_jit/tvm_ffi_utils.h"\n' + (sources / "add.cc").read_text()
    )
    code = f"""{WATCH_CHILDREN}
answers = []
def children_of(f):
    del started[:]
    answers.append(f())
    return len(started)
def load():
{indent(load_add(sources, includes, cuda=False, name="odd c++"))}
    return module.add(1)
def load_cuda():
{indent(load_add(sources, includes, cuda=True, name="odd cuda"))}
    return module.add(1)
loaders = [load, load_cuda] if {HAS_NVCC} else [load]
from pathlib import Path
inner = Path({str(includes / "inner.h")!r})
counts = []
for f in loaders:
    inner.write_text("#define STEP 1")
    counts += [children_of(f) > 0, children_of(f)]
    inner.write_text("#define STEP 2")
    counts += [children_of(f) > 0]
import sgl_moe_jit
result = [answers, counts, sgl_moe_jit.__file__]
"""
    cache = {"SGL_MOE_JIT_CACHE_DIR": str(tmp_path / "cache" / NASTY)}
    (answers, counts, where), _ = run_child(code, cache, package_root)
    kinds = 1 + HAS_NVCC
    assert answers == [2, 2, 3] * kinds
    assert counts == [True, 0, True] * kinds, "built, hit without a child process, rebuilt"
    assert where.startswith(str(package_root))


def indent(code: str) -> str:
    return "\n".join("    " + line for line in code.strip().splitlines())


@pytest.mark.field_report("J39")
def test_importing_touches_no_gpu_starts_no_process_and_writes_nothing(tmp_path):
    cache = tmp_path / "cache"
    code = f"""{WATCH_CHILDREN}
import torch  # its own import is not ours to judge
del started[:]
import ctypes, os, pkgutil, importlib
import sgl_moe_jit, sgl_moe_jit.jit, sgl_moe_jit.ops
for name in sgl_moe_jit.__all__:
    getattr(sgl_moe_jit, name)
try:
    count = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
except OSError:
    driver = None  # no driver on this machine
result = [torch.cuda.is_initialized(), driver, started, os.path.exists({str(cache)!r})]
"""
    initialized, driver, started, wrote = run_child(code, {"SGL_MOE_JIT_CACHE_DIR": str(cache)})[0]
    assert not initialized
    assert driver in (None, 3), "3: CUDA_ERROR_NOT_INITIALIZED"
    assert started == []
    assert not wrote


@pytest.mark.field_report("J39")
def test_after_a_load_a_forked_child_can_load_another_module(tmp_path):
    write_add_sources(tmp_path, tmp_path)
    code = f"""
import os, signal
{load_add(tmp_path, tmp_path, cuda=False, name="before-fork")}
child = os.fork()
if child == 0:
    signal.alarm(60)
    other = load_jit("after-fork", cpp_files=[folder / "add.cc"], extra_include_paths=[include],
                     extra_cflags=["-DBONUS=10"])
    os._exit(0 if (module.add(1), other.add(1)) == (2, 12) else 1)
_, status = os.waitpid(child, 0)
result = [status, module.add(1)]
"""
    assert run_child(code)[0] == [0, 2]


@pytest.mark.gpu
@pytest.mark.field_report("J39")
def test_after_the_import_a_forked_child_can_use_the_gpu():
    code = """
import os
import torch, sgl_moe_jit, sgl_moe_jit.ops
child = os.fork()
if child == 0:
    x = torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)
    idx = torch.zeros(1, 1, device="cuda", dtype=torch.int32)
    w = torch.full((1, 1), 2.0, device="cuda")
    y = sgl_moe_jit.moe_finalize_fuse_shared(x, idx, w, x, 1)
    os._exit(0 if y.tolist() == [[3.0] * 8] else 1)
result = os.waitpid(child, 0)[1]
"""
    assert run_child(code)[0] == 0


def test_eight_processes_on_an_empty_cache_agree_and_publish_one_leaf(tmp_path):
    write_add_sources(tmp_path, tmp_path)
    cache = tmp_path / "cache"
    # One import, then eight children that start together: what a launcher of ranks does.
    code = f"""
import os, signal
import torch, tvm_ffi, sgl_moe_jit.jit
read, write = os.pipe()
children = []
for i in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        os.close(write)
        os.read(read, 1)  # returns when the parent closes its end
        {load_add(tmp_path, tmp_path, cuda=False).strip().replace(chr(10), chr(10) + " " * 8)}
        os._exit(0 if module.add(1) == 2 else 1)
    children.append(child)
os.close(write)
result = [os.waitpid(child, 0)[1] for child in children]
"""
    assert run_child(code, {"SGL_MOE_JIT_CACHE_DIR": str(cache)})[0] == [0] * 8
    (leaf,) = cache.glob("add/*/*")
    assert sorted(path.name for path in leaf.iterdir()) == ["manifest.json", "module.so"]
    assert list((cache / ".staging").iterdir()) == []


@needs_nvcc
def test_header_only_cuda_functions_are_exported(tmp_path):
    (tmp_path / "kernel.cuh").write_text(
        "#pragma once\n#include <cuda_runtime.h>\n#include <cstdint>\n"
        "template <int N> __global__ void fill(int* x) { *x = N; }\n"
        "template <int N> int64_t size_of_fill() {\n"
        "  cudaFuncAttributes a;\n"
        "  return cudaFuncGetAttributes(&a, fill<N>) == cudaSuccess ? N : -N;\n}\n"
    )
    code = f"""
from pathlib import Path
from sgl_moe_jit.jit import load_jit
module = load_jit("cuda-wrapped", cuda_files=[Path({str(tmp_path)!r}) / "kernel.cuh"],
                  cuda_wrappers=[("four", "size_of_fill<4>"), ("five", "size_of_fill<5>")],
                  arch="9.0a")
result = [abs(module.four()), abs(module.five())]
"""
    assert run_child(code)[0] == [4, 5]
