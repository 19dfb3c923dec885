# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Python extensions: modules that are loaded by Python's own import machinery."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from sgl_moe_jit.jit import cache
from sgl_moe_jit.jit.build import Tools
from sgl_moe_jit.jit.loader import load_spec
from sgl_moe_jit.jit.spec import BuildSpec


def why_no_extension(build: BuildSpec) -> str | None:
    """Return why this Python can have no extension, or None. Starts no process.

    A cached one needs no headers.
    """
    if sys.implementation.name != "cpython":
        return f"written for CPython, this is {sys.implementation.name}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "written for a Python with a global lock, this one is free-threaded"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file() and cache.find(build, cache.key_of(build)) is None:
        return f"needs Python's headers, and there is no {header}"
    return None


def load_extension(build: BuildSpec, name: str) -> ModuleType:
    """Return a new module from a spec made with ``python=True``: from the cache, or built now.

    Args:
        build: Its library defines ``PyInit_<name>``.
        name: The module's; nothing is left in ``sys.modules``.

    Raises:
        ToolchainError, BuildError, LoadError, UnsupportedError: as ``load_jit``.
    """

    def load(path: Path, _: Tools | None) -> ModuleType:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules.pop(name, None)  # where CPython puts one of a single phase by itself
        return module

    module: ModuleType = load_spec(build, load)
    return module
