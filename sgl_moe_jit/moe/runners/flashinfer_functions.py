# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Finding FlashInfer's functions: nothing is imported before a runner asks for them."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.runners.base import Support
from sgl_moe_jit.moe.runners.flashinfer_abi import CHECKED, check_version, version_key

_PACKAGE = "flashinfer-python"
# Prebuilt kernels, in wheels of their own. Of another version than FlashInfer's they are stale.
_COMPANIONS = ("flashinfer-cubin", "flashinfer-jit-cache")
# Name: the module that exports it, in every version from the floor on.
_NAMES = {
    "trtllm_bf16_moe": "flashinfer.fused_moe",
    "trtllm_bf16_routed_moe": "flashinfer.fused_moe",
    "trtllm_fp4_block_scale_moe": "flashinfer.fused_moe",
    "trtllm_fp4_block_scale_routed_moe": "flashinfer.fused_moe",
    "trtllm_fp8_block_scale_moe": "flashinfer.fused_moe",
    "trtllm_fp8_block_scale_routed_moe": "flashinfer.fused_moe",
    "cutlass_fused_moe": "flashinfer.fused_moe",
    "fp4_quantize": "flashinfer",
    "mxfp8_quantize": "flashinfer",
}


@dataclass(frozen=True)
class FlashInferFunctions:
    """FlashInfer's functions, by its own names.

    Attributes:
        version: FlashInfer's.
        table: Name to function. Tests put others here.
    """

    version: str
    table: Mapping[str, Callable[..., Any]]
    _signatures: dict[str, inspect.Signature] = field(default_factory=dict, repr=False)

    def get(self, name: str) -> Callable[..., Any]:
        """Return a function.

        Raises:
            UnsupportedError: this version has none of that name.
        """
        if name not in self.table:
            raise UnsupportedError(
                f"flashinfer {self.version}: no function {name!r}; install a version whose "
                f"functions were checked, {CHECKED}"
            )
        return self.table[name]

    def signature(self, name: str) -> inspect.Signature:
        """Return a function's signature."""
        if name not in self._signatures:
            self._signatures[name] = inspect.signature(self.get(name))
        return self._signatures[name]

    def takes(self, name: str, parameter: str) -> bool:
        """Return whether a function has a parameter of that name."""
        return parameter in self.signature(name).parameters

    def check_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Check that a call with these keyword arguments fits the function's real signature.

        Raises:
            UnsupportedError: a name is unknown, or a parameter without default is not given.
        """
        try:
            self.signature(name).bind(**arguments)
        except TypeError as error:
            raise UnsupportedError(
                f"flashinfer {self.version}, {name}: does not take this library's call: {error}; "
                f"install a version whose functions were checked, {CHECKED}"
            ) from None


def installed_version(package: str = _PACKAGE) -> str | None:
    """Return the installed version of a package without importing it; None when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_installed() -> Support:
    """Say whether FlashInfer is there, new enough, and without a stale pack. Imports nothing."""
    version = installed_version()
    if version is None:
        return Support(False, f"flashinfer is not installed; pip install {_PACKAGE}")
    try:
        support = check_version(version)
    except UnsupportedError as error:
        return Support(False, str(error))
    if not support.ok:
        return support
    for companion in _COMPANIONS:
        found = installed_version(companion)
        if found is not None and version_key(found) != version_key(version):
            plain = version.split("+")[0]
            return Support(
                False,
                f"{companion} {found} is installed beside {_PACKAGE} {version}: its kernels belong "
                f"to another version; pip install '{companion}=={plain}', or pip uninstall "
                f"{companion}",
            )
    return Support(True)


_lock = threading.Lock()
_found: FlashInferFunctions | UnsupportedError | None = None


def flashinfer_functions() -> FlashInferFunctions:
    """Return the installed FlashInfer's functions; imports it on the first call.

    Raises:
        UnsupportedError: not installed, too old, beside a stale pack, or its import fails. The
            outcome is kept for the process.
    """
    global _found
    with _lock:
        if _found is None:
            try:
                _found = _find()
            except UnsupportedError as error:
                _found = error
        if isinstance(_found, UnsupportedError):
            raise UnsupportedError(str(_found))
        return _found


def _import(module: str, version: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a third party's import raises
        raise UnsupportedError(
            f"flashinfer {version}: import {module} fails: {type(error).__name__}: {error}; "
            f"python -c 'import {module}' shows it whole"
        ) from error


def _find() -> FlashInferFunctions:
    support = check_installed()
    if not support.ok:
        raise UnsupportedError(support.why)
    version = installed_version()
    assert version is not None  # check_installed has seen it
    # A source checkout may shadow the installed package.
    version = str(getattr(_import("flashinfer", version), "__version__", version))
    support = check_version(version)
    if not support.ok:
        raise UnsupportedError(support.why)
    table = {
        name: getattr(_import(module, version), name)
        for name, module in _NAMES.items()
        if hasattr(_import(module, version), name)
    }
    return FlashInferFunctions(version, table)
