# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The quick way of an op's eager calls: through a C extension once that is loaded.

The extension is compiled like the kernels, beside the first of them. Where it cannot be (no
headers of Python, no compiler), calls stay in Python, with the same results.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sgl_moe_jit import env
from sgl_moe_jit.jit import (
    BuildSpec,
    cache,
    cache_once,
    load_extension,
    make_spec,
    why_no_extension,
)
from sgl_moe_jit.ops.library import cpu_settings, is_watched_by_function_mode

logger = logging.getLogger("sgl_moe_jit.ops")

_MODULE = "sgl_moe_jit_quick_call"  # PyInit_... in csrc/host/quick_call.cc


def extension_spec() -> BuildSpec:
    """Return the extension's build."""
    return make_spec(("quick_call",), cpp_files=["host/quick_call.cc"], python=True)


class QuickWay:
    """How an op's plain eager calls are served: None where they are not.

    Attributes:
        call: Takes every parameter by position; the output (a tuple of several), or None where the
            long way serves. It is ``in_python`` until the extension is loaded.
        in_python: The same calls served without the extension.
        compiled: The extension's object, once that is loaded.
    """

    def __init__(
        self,
        in_python: Callable[..., Any],
        parameters: str,
        tables: tuple[dict[int, Any], dict[int, Any], dict[int, Any]],
        key: int,
        second: int = -1,
    ) -> None:
        """Describe an op.

        Args:
            in_python: Serves until the extension does.
            parameters: Their kinds, a letter each; the first is a tensor. ``T`` tensor, ``x``
                tensor of integers, ``t`` tensor or None, ``o`` output or None (make it), ``i`` int,
                ``I`` int or None, ``f`` float, ``n`` float or int, ``p`` True, False or None, for
                dependent launches. A tensor may be a ``torch.nn.Parameter``.
            tables: The modules that served last, by the ``key`` parameter: tuples that end in what
                the module's ``quick_address`` returned. The last table is for a CPU.
            key: Number of an ``i`` parameter.
            second: Number of the parameter whose presence asks for the second table.
        """
        self.call = self.in_python = in_python
        self.compiled: Any = None
        self._description = (parameters, tables, key, second)
        _ways.append(self)
        if _extension.cache_size() != 0:  # an op's module imported late, or once more
            _install()

    def install(self, extension: ModuleType) -> None:
        """Serve calls through the extension from now on."""
        if self.compiled is None:
            self.compiled = extension.QuickCall(*self._description)
        self.choose()

    def choose(self) -> None:
        """Set ``call`` by what is loaded and by ``in_python``."""
        left_out = self.compiled is None or _left_out != 0
        self.call = self.in_python if left_out else self.compiled


_ways: list[QuickWay] = []
_left_out = 0  # in_python contexts that are open


def never(*_: object) -> None:
    """Serve no call: of an op whose calls take the long way without the extension."""


def why_in_python() -> str | None:
    """Return why eager calls cannot leave Python here, or None. Builds nothing.

    Raises:
        ValueError: ``SGL_MOE_JIT_QUICK_CALL`` is neither on nor off.
    """
    if not env.QUICK_CALL.get():
        return f"{env.QUICK_CALL.name} is off"
    return why_no_extension(extension_spec())


def is_cached() -> bool:
    """Whether the extension could be loaded without a compiler."""
    spec = extension_spec()
    return cache.find(spec, cache.key_of(spec)) is not None


def build() -> str | None:
    """Have the extension in the cache; return why not, or None. Serves no call by it."""
    try:
        why = why_in_python()
        if why is None:
            load_extension(extension_spec(), _MODULE)
        return why
    except Exception as error:
        return _brief(error)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@cache_once
def _extension() -> tuple[ModuleType | None, str]:
    """Return the extension, bound to torch; or None, and why. Never raises."""
    try:
        why = why_in_python()
        if why is not None:
            return None, why
        extension = load_extension(extension_spec(), _MODULE)
        extension.bind(
            tensor=Tensor,
            parameter=torch.nn.Parameter,
            function_modes=torch._C._len_torch_function_stack,
            is_watched=is_watched_by_function_mode,
            is_tracing=torch._C._is_tracing,
            examples=tuple((x, x._cdata) for x in (torch.empty(1), torch.empty(2), torch.empty(3))),
            cpu_settings=cpu_settings,
            forward_ad=vars(forward_ad),
            texts=env.environ_texts,
            names=env.FLAG_NAMES,
            read_flags=env.launch_flags,
            refused=env.FLAG_CHECK_INDICES,
            pdl=env.FLAG_PDL,
        )
    except Exception as error:  # calls work without it; a torch of the future may break it
        return None, _brief(error)
    return extension, ""


def _install() -> None:
    extension, why = _extension()
    if extension is None:
        logger.info("eager calls stay in Python: %s", why)
        return
    for way in _ways:
        way.install(extension)


@contextmanager
def loading() -> Iterator[None]:
    """Load the extension, if it is not yet, beside what the body does: load a kernel.

    Raises:
        ValueError: ``SGL_MOE_JIT_QUICK_CALL`` is neither on nor off.
    """
    if _extension.cache_size() == 0:
        env.QUICK_CALL.get()  # nonsense is told here, and not in the thread
        thread = threading.Thread(target=_install)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or Python is shutting down
            _install()
        try:
            yield
        finally:
            if thread.ident is not None:
                thread.join()
    else:
        yield


@contextmanager
def in_python() -> Iterator[None]:
    """Leave the extension out, in all threads, to compare."""
    _leave_out(1)
    try:
        yield
    finally:
        _leave_out(-1)


def _leave_out(more: int) -> None:
    global _left_out
    _left_out += more
    for way in _ways:
        way.choose()


def state() -> tuple[bool, str]:
    """Load the extension, if it is not yet; return whether eager calls use it, and why not."""
    with loading():
        pass
    extension, why = _extension()
    return extension is not None, why
