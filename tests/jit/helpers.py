# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Tiny sources and child processes for the tests of the JIT runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_moe_jit.jit import toolchain

REPO = Path(__file__).resolve().parents[2]

# A folder name with everything that shells, make, ninja and search paths treat specially.
NASTY = "a b:c$d'e"

ADD_CC = """
#include <tvm/ffi/function.h>
#include "outer.h"
#ifndef BONUS
#define BONUS 0
#endif
static int64_t add(int64_t x) { return x + STEP + BONUS; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, add);
"""

ADD_CU = """
#include <cuda_runtime.h>
#include "outer.h"
__global__ void add_kernel(long long* x) { *x += STEP; }
long long add_step() { return STEP; }
int launch_add(long long* x) {
  add_kernel<<<1, 1>>>(x);
  return cudaGetLastError();
}
"""

ADD_CU_BINDING_CC = """
#include <tvm/ffi/function.h>
long long add_step();
int launch_add(long long* x);
static int64_t add(int64_t x) { return x + add_step(); }
static int64_t launch(int64_t x) { return launch_add(reinterpret_cast<long long*>(x)); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, launch);
"""

# Puts every start of a child process into `started`; run it before the imports under test.
WATCH_CHILDREN = """
import sys
started = []
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
sys.addaudithook(lambda event, args: started.append(str(args)) if event in STARTS else None)
"""

needs_nvcc = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)


def write_add_sources(source_dir: Path, include_dir: Path, step: int = 1) -> dict[str, Path]:
    """Write ``add`` for C++ and CUDA; both include outer.h, it inner.h, and that holds STEP."""
    source_dir.mkdir(parents=True, exist_ok=True)
    include_dir.mkdir(parents=True, exist_ok=True)
    texts = {
        source_dir / "add.cc": ADD_CC,
        source_dir / "add.cu": ADD_CU,
        source_dir / "add_binding.cc": ADD_CU_BINDING_CC,
        include_dir / "outer.h": '#pragma once\n#include "inner.h"\n',
        include_dir / "inner.h": f"#pragma once\n#define STEP {step}\n",
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return {path.name: path for path in texts}


def run_child(code: str, env: dict[str, str] | None = None, package_root: Path = REPO):
    """Run ``code`` in a new Python; it stores its answer in ``result``, which comes back."""
    # sys.path, not PYTHONPATH: that one cannot hold a colon.
    script = f"import sys\nsys.path.insert(0, {str(package_root)!r})\nresult = None\n{code}\n"
    script += "import json\nprint('RESULT' + json.dumps(result))\n"
    merged = {**os.environ, **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    line = next(x for x in reversed(done.stdout.splitlines()) if x.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT")), done.stderr


def write_script(path: Path, text: str) -> Path:
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def fake_nvcc(path: Path, top: Path | None = None, release: str = "13.0") -> Path:
    """Write an nvcc that answers --version, and --dryrun with its toolkit ``top``."""
    dryrun = f"echo '#$ TOP={top}' >&2" if top else "exit 3"
    return write_script(
        path, f'case "$*" in *--version*) echo "release {release}, V1";; *) {dryrun};; esac'
    )


def fake_toolkit(root: Path, include: str = "include", lib: str = "lib/libcudart.so.13") -> Path:
    """Write a toolkit's runtime headers and library, as empty files."""
    for name in (f"{include}/cuda_runtime.h", lib):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def path_with_only(folder: Path, *names: str) -> str:
    """Return a PATH that holds these programs and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        real = shutil.which(name)
        assert real is not None, name
        (folder / name).symlink_to(real)
    return str(folder)
