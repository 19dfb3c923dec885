# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What is to be built: a frozen value from which command lines and the cache key follow.

Every path a compiler sees is relative to the build folder, where ``roots/<name>`` links to the real
folder. So command lines hold no machine's paths, no path needs quoting, and the compiler's
dependency list names files the same way on every machine.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.jit import paths
from sgl_moe_jit.jit.arch import CudaArch
from sgl_moe_jit.jit.dependencies import Dependency, find_dependency

# Placeholders in command lines; the build fills them in, the key keeps them as they are.
NVCC, CXX, CUDART = "{nvcc}", "{cxx}", "{cudart}"

_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall")
_CUDA_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden")
# --trace: the linker names every file it reads. Unlike --dependency-file, every linker has it.
_LINK_FLAGS = ("-shared", "-Wl,--no-undefined,--as-needed,--trace")

Wrapper = tuple[str, str]  # (exported name, C++ function)


@dataclass(frozen=True)
class CompileUnit:
    """One translation unit.

    Attributes:
        stem: File name of the object, without ``.o``.
        source: Path relative to the build folder.
        text: Generated source to write there, or None for a file below ``roots/``.
        command: Argument list, with placeholders.
    """

    stem: str
    source: str
    text: str | None
    command: tuple[str, ...]


@dataclass(frozen=True)
class BuildSpec:
    """Everything that reaches the compiler.

    Attributes:
        name: Parts of the module's name; ``label`` joins them.
        units: Compiled side by side.
        link: Argument list of the link, with placeholders.
        roots: ``(name, folder)`` links made in the build folder.
        dependencies: Header dependencies; provider and version are part of the key.
        arch: CUDA target, or None for a module without device code.
    """

    name: tuple[str, ...]
    units: tuple[CompileUnit, ...]
    link: tuple[str, ...]
    roots: tuple[tuple[str, Path], ...]
    dependencies: tuple[Dependency, ...]
    arch: CudaArch | None

    @property
    def label(self) -> str:
        """The name as one word that is safe, and short enough, as a file name."""
        return re.sub(r"[^A-Za-z0-9_.-]|^\.", "_", "-".join(self.name))[:100]

    @property
    def uses_cuda(self) -> bool:
        """Whether the module has device code and links the CUDA runtime."""
        return self.arch is not None


def _wrapper_text(headers: Sequence[str], wrappers: Sequence[Wrapper]) -> str:
    lines = ["#include <tvm/ffi/function.h>", *(f'#include "{header}"' for header in headers)]
    for export, function in wrappers:
        if not re.fullmatch(r"[A-Za-z_]\w*", export):
            raise ValueError(f"wrappers: expected a C identifier to export, got {export!r}")
        lines.append(f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({function}));")
    return "\n".join(lines) + "\n"


def require_lists(**arguments: object) -> None:
    """Refuse one string, which would be taken letter by letter, and items that are no text.

    Raises:
        TypeError: names the argument, or the item.
    """
    for name, value in arguments.items():
        if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Sequence):
            raise TypeError(f"{name}: expected a list of strings, got {value!r}; put it in [ ]")
        kinds = (str, os.PathLike) if name.endswith(("_files", "_paths")) else str
        for i, item in enumerate(value):
            if not isinstance(item, kinds):
                raise TypeError(f"{name}[{i}]: expected a string, got {item!r}")


def _require_pairs(**arguments: object) -> None:
    """Refuse wrappers that are not ``(export, function)`` pairs of strings.

    Raises:
        TypeError: names the argument, or the item.
    """
    for name, value in arguments.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{name}: expected a list of (export, function) pairs, got {value!r}")
        for i, item in enumerate(value):
            pair = isinstance(item, (tuple, list)) and [type(x) for x in item] == [str, str]
            if not pair:
                raise TypeError(f"{name}[{i}]: expected an (export, function) pair, got {item!r}")


def _refuse_response_files(**arguments: Sequence[str]) -> None:
    # What stands in such a file would reach the compiler and not the key.
    for name, words in arguments.items():
        for i, word in enumerate(words):
            if re.match(r"@|-(W[alp]|X[a-z]+|-[a-z]+-options)[,=](.*,)?@", word):
                raise ValueError(
                    f"{name}[{i}]: expected flags, got a file of flags {word!r}; "
                    "pass what it contains"
                )


class _Roots:
    """Collects the folders a build refers to and names files relative to them."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Path]] = []

    def add(self, name: str, folder: Path) -> str:
        self.items.append((name, folder.resolve()))
        return f"roots/{name}"

    def file(self, kind: str, index: int, name: str | Path) -> str:
        """Return a source's path below a root; relative names are looked up in csrc, include."""
        path = Path(name)
        if path.is_absolute():
            if not path.is_file():
                raise FileNotFoundError(f"{kind}[{index}]: no such file: {path}")
            return f"{self.add(f'{kind}{index}', path.parent)}/{path.name}"
        for root, folder in (("csrc", paths.csrc_dir()), ("include", paths.include_dir())):
            if (folder / path).is_file():
                return f"roots/{root}/{path.as_posix()}"
        raise FileNotFoundError(f"{kind}[{index}]: {name} is in neither csrc/ nor include/")


def make_spec(
    name: tuple[str, ...],
    *,
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
    arch: CudaArch | None = None,
    python: bool = False,
) -> BuildSpec:
    """Turn :func:`load_jit`'s arguments into a :class:`BuildSpec`. Starts no process.

    ``python``: it is an extension of this very Python and torch. It may include the headers of
    Python and c10, is linked with c10 and torch_python, and finds Python's own symbols when it is
    loaded.

    Raises:
        TypeError: a string where a list of strings is expected.
        ValueError: nothing to compile, CUDA sources without ``arch``, wrappers that do not fit, or
            an ``@file`` among the flags.
        FileNotFoundError: a source is missing.
        DependencyError: a header dependency is missing.
    """
    import tvm_ffi.libinfo

    if not name or not all(isinstance(part, str) and part for part in name):
        raise ValueError(f"name: expected one or more non-empty strings, got {name!r}")
    flags = {
        "extra_cflags": extra_cflags,
        "extra_cuda_cflags": extra_cuda_cflags,
        "extra_ldflags": extra_ldflags,
    }
    require_lists(
        cuda_files=cuda_files,
        cpp_files=cpp_files,
        extra_include_paths=extra_include_paths,
        extra_dependencies=extra_dependencies,
        **flags,
    )
    _require_pairs(cuda_wrappers=cuda_wrappers, cpp_wrappers=cpp_wrappers)
    _refuse_response_files(**flags)
    if not cuda_files and not cpp_files:
        raise ValueError("cuda_files, cpp_files: expected at least one source")
    if cuda_files and arch is None:
        raise ValueError("arch: expected a CUDA target for cuda_files")
    for kind, files, pairs in (
        ("cuda", cuda_files, cuda_wrappers),
        ("cpp", cpp_files, cpp_wrappers),
    ):
        if pairs and not files:
            raise ValueError(f"{kind}_wrappers: expected the header to wrap in {kind}_files")
    wrapped = bool(cuda_wrappers or cpp_wrappers)
    header_only = wrapped if header_only is None else header_only
    if header_only != wrapped:
        raise ValueError("header_only: expected True exactly when wrappers are named")

    roots = _Roots()
    includes = [
        f"-I{roots.add('csrc', paths.csrc_dir())}",
        f"-I{roots.add('include', paths.include_dir())}",
    ]
    for i, folder in enumerate(extra_include_paths):
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"extra_include_paths[{i}]: no such folder: {folder}")
        includes.append(f"-I{roots.add(f'extra{i}', Path(folder))}")
    dependencies = tuple(find_dependency(d) for d in extra_dependencies)
    for dependency in dependencies:
        for i, folder in enumerate(dependency.include_dirs):
            includes += ["-isystem", roots.add(f"{dependency.name}{i}", folder)]
    for i, folder in enumerate(dict.fromkeys(tvm_ffi.libinfo.include_paths())):
        includes += ["-isystem", roots.add(f"tvm_ffi{i}", Path(folder))]
    if python:
        import torch

        package = Path(torch.__file__).parent
        includes += ["-isystem", roots.add("python", Path(sysconfig.get_path("include")))]
        includes += ["-isystem", roots.add("torch", package / "include")]
        extra_cflags = [*extra_cflags, f"-DSMJ_PYTHON_ABI={sysconfig.get_config_var('SOABI')}"]
        library = f"-L{roots.add('torch_lib', package / 'lib')}"
        extra_ldflags = [*extra_ldflags, library, "-lc10", "-ltorch_python"]
        extra_ldflags.append("-Wl,--unresolved-symbols=ignore-all")
    # The build links roots/cuda to the toolkit's headers; nvcc finds its own.
    cuda_include = ["-isystem", "roots/cuda"] if cuda_files else []

    cxx = [CXX, *_CXX_FLAGS, *includes, *cuda_include, *extra_cflags]
    nvcc = [NVCC, *_CUDA_FLAGS, arch.gencode() if arch else "", *includes, *extra_cuda_cflags]
    units: list[CompileUnit] = []

    def add(
        kind: str, files: Sequence[str | Path], wrappers: Sequence[Wrapper], base: list[str]
    ) -> None:
        sources = [roots.file(f"{kind}_files", i, f) for i, f in enumerate(files)]
        text = None
        if wrappers:  # one generated source, which lies in the build folder beside roots/
            text = _wrapper_text(sources, wrappers)
            sources = [f"{kind}_wrappers.{'cu' if kind == 'cuda' else 'cc'}"]
        for i, source in enumerate(sources):
            stem = f"{kind}{i}"
            tail = ("-MD", "-MF", f"{stem}.d", "-c", source, "-o", f"{stem}.o")
            units.append(CompileUnit(stem, source, text, (*base, *tail)))

    add("cuda", cuda_files, cuda_wrappers, nvcc)
    add("cpp", cpp_files, cpp_wrappers, cxx)
    link = [CXX, *_LINK_FLAGS, *(f"{unit.stem}.o" for unit in units)]
    if cuda_files:
        link += ["-Lroots/cudart", CUDART]
    link += ["-Lroots/tvm_ffi_lib", "-ltvm_ffi", "-lpthread", *extra_ldflags, "-o", "module.so"]
    roots.add("tvm_ffi_lib", Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent)
    return BuildSpec(
        name,
        tuple(units),
        tuple(link),
        tuple(roots.items),
        dependencies,
        arch if cuda_files else None,
    )
