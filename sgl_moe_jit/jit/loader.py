# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``load_jit``: a module from the cache, or built, loaded and published."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_moe_jit.errors import LoadError, UnsupportedError
from sgl_moe_jit.jit import build as building
from sgl_moe_jit.jit import cache, manifest, paths, toolchain
from sgl_moe_jit.jit.arch import CudaArch, current_arch
from sgl_moe_jit.jit.spec import BuildSpec, Wrapper, make_spec, require_lists

logger = logging.getLogger("sgl_moe_jit.jit")


def _preload_cudart(name: str, tools: building.Tools | None) -> None:
    """Load ``libcudart.so.N``, so that a module finds it by name.

    torch's CUDA builds have loaded it. A CPU build has not, nor one for another CUDA version.
    """
    roots = toolchain.cuda_roots()
    if tools is not None and tools.cuda is not None:
        roots.insert(0, tools.cuda.root)
    for root in roots:
        for folder in toolchain.library_dirs(root):
            try:
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return


def _load(module: Path, tools: building.Tools | None) -> Any:
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(module))
    except Exception as error:
        missing = re.search(r"libcudart\.so\.\d+", str(error))
        if missing is None:
            raise
    _preload_cudart(missing.group(), tools)
    return tvm_ffi.load_module(str(module))


def load_spec(build: BuildSpec, load: Callable[[Path, building.Tools | None], Any] = _load) -> Any:
    """Return the module of a spec: from the cache, or built now. See :func:`load_jit`.

    ``load`` opens the library; given the tools when they have just built it.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(f"kernels are built on Linux only, this is {sys.platform}")
    key = cache.key_of(build)
    found = cache.find(build, key)
    if found is not None:
        try:
            return load(found, None)
        except Exception as error:
            building.find_tools(build)  # raises here, before an entry is lost that cannot be remade
            cache.discard(found.parent, error)
    tools = building.find_tools(build)
    staging = cache.new_staging()
    target = f" for {build.arch.name}" if build.arch else ""
    logger.info("building %s%s into %s", build.label, target, paths.cache_root())
    started = time.perf_counter()
    try:
        result = building.run_build(build, tools, staging)
        leaf = manifest.write(build, tools, result)
        try:
            module = load(result.module, tools)
        except Exception as error:
            raise LoadError(f"{build.label}: the built module does not load: {error}") from error
        changed = manifest.changed_during(result)
        try:
            if not changed:
                cache.publish(build, key, leaf, staging)
        except OSError as error:
            logger.warning("%s works but could not be cached: %s", build.label, error)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if changed:
        # Which of its two contents was compiled is not known, so the next process builds again.
        logger.warning("%s is not cached: %s changed while it was built", build.label, changed[0])
    logger.info("built %s%s in %.1f s", build.label, target, time.perf_counter() - started)
    return module


def load_jit(
    *name: str,
    cuda_files: Sequence[str | Path] = (),
    cpp_files: Sequence[str | Path] = (),
    cuda_wrappers: Sequence[Wrapper] = (),
    cpp_wrappers: Sequence[Wrapper] = (),
    extra_cflags: Sequence[str] = (),
    extra_cuda_cflags: Sequence[str] = (),
    extra_ldflags: Sequence[str] = (),
    extra_include_paths: Sequence[str | Path] = (),
    extra_dependencies: Sequence[str] = (),
    header_only: bool | None = None,
    arch: CudaArch | str | None = None,
) -> Any:
    """Compile C++ and CUDA sources into a TVM-FFI module, or load it from the cache.

    Files are looked up in ``csrc/`` and ``include/`` of this package unless absolute. They compile
    side by side in a private folder, are loaded, then published by rename. A hit starts no child
    process and needs no compiler. Wrap the call in :func:`cache_once`; this function keeps nothing
    in memory.

    Args:
        *name: One or more words; part of the cache key and of the log lines.
        cuda_files: .cu sources for nvcc (headers, when ``cuda_wrappers`` are named).
        cpp_files: .cc sources for the host compiler (headers, when ``cpp_wrappers`` are named).
        cuda_wrappers: ``(export, function)`` pairs for header-only kernels: a source that includes
            ``cuda_files`` and exports each function is generated.
        cpp_wrappers: The same for ``cpp_files``.
        extra_cflags: For the host compiler.
        extra_cuda_cflags: For nvcc, such as ``-DNAME=value``.
        extra_ldflags: For the link.
        extra_include_paths: Searched after this package's own.
        extra_dependencies: ``"cutlass"``, or ``"cutlass:nvidia-cutlass"`` /
            ``"cutlass:flashinfer"``.
        header_only: None means: true when wrappers are named.
        arch: CUDA target of ``cuda_files``; None takes ``SGL_MOE_JIT_CUDA_ARCH``, else the current
            device's.

    Returns:
        ``tvm_ffi.Module``; each export is an attribute.

    Raises:
        TypeError: a string where a list of strings is expected.
        ValueError, FileNotFoundError: the arguments do not describe a build.
        DependencyError: headers of ``extra_dependencies`` are missing.
        ToolchainError: on a miss, when a compiler is missing.
        BuildError: the compiler failed; starts with its first error.
        LoadError: the built module does not load.
        UnsupportedError: not Linux.
    """
    require_lists(cuda_files=cuda_files)  # before a device is asked for
    if not cuda_files:
        arch = None
    elif arch is None:
        arch = current_arch()
    elif isinstance(arch, str):
        arch = CudaArch.parse(arch)
    return load_spec(
        make_spec(
            name,
            cuda_files=cuda_files,
            cpp_files=cpp_files,
            cuda_wrappers=cuda_wrappers,
            cpp_wrappers=cpp_wrappers,
            extra_cflags=extra_cflags,
            extra_cuda_cflags=extra_cuda_cflags,
            extra_ldflags=extra_ldflags,
            extra_include_paths=extra_include_paths,
            extra_dependencies=extra_dependencies,
            header_only=header_only,
            arch=arch,
        )
    )
