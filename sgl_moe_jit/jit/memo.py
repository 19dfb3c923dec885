# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``cache_once``: each distinct call runs once a process, however many threads ask."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_MISSING: Any = object()

# Immutable scalars whose equality never crosses a type once the type stands beside them in the key.
_PLAIN = (int, bool, str, bytes, type(None))


def _typed(value: Any) -> Any:
    """Return a key part under which 1, True, 1.0 and -0.0, 0.0 differ, also inside tuples."""
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if isinstance(value, float):
        return (kind, float.hex(value))
    if isinstance(value, tuple):
        return (kind, tuple(map(_typed, value)))
    if isinstance(value, frozenset):
        return (kind, frozenset(map(_typed, value)))
    return (kind, value)


class _Pending:
    """One build in flight: its lock, who holds it, and how many wait."""

    __slots__ = ("lock", "owner", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner: int | None = None
        self.users = 0


class CachedOnce(Protocol[P, R_co]):
    """What :func:`cache_once` returns."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the one result for these arguments, computing it on the first call."""
        ...

    def cache_clear(self) -> None:
        """Forget every result. Computations in flight finish and are kept."""
        ...

    def cache_size(self) -> int:
        """Return how many results are kept."""
        ...


class _Table(Generic[R]):
    """The results of one function and the computations in flight."""

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.arity = len(parameters) if all(p.kind in positional for p in parameters) else -1
        self.results: dict[Any, R] = {}
        self.pending: dict[Any, _Pending] = {}
        self.guard = threading.Lock()
        _tables.add(self)

    def normalise(self, args: Any, kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if self.arity >= 0:
            return tuple(map(_typed, bound.arguments.values()))
        named = tuple(sorted((name, _typed(v)) for name, v in bound.kwargs.items()))
        return (tuple(map(_typed, bound.args)), named)

    def compute(self, key: Any, args: Any, kwargs: Any) -> R:
        with self.guard:
            pending = self.pending.setdefault(key, _Pending())
            if pending.owner == threading.get_ident():
                name = getattr(self.function, "__qualname__", repr(self.function))
                raise RuntimeError(f"{name}: called itself with the same arguments while computing")
            pending.users += 1
        try:
            with pending.lock:
                found = self.results.get(key, _MISSING)
                if found is not _MISSING:  # another thread was first
                    return cast("R", found)
                pending.owner = threading.get_ident()
                try:
                    # An exception leaves no entry: a later call, or the next waiter, tries again.
                    result = self.results[key] = self.function(*args, **kwargs)
                    return result
                finally:
                    pending.owner = None
        finally:
            with self.guard:
                pending.users -= 1
                if pending.users == 0:
                    self.pending.pop(key, None)

    def after_fork(self) -> None:
        # A lock held by a thread that does not exist in the child would never be released.
        self.guard = threading.Lock()
        self.pending = {}


_tables: weakref.WeakSet[_Table[Any]] = weakref.WeakSet()


def _reset_tables_after_fork() -> None:
    for table in list(_tables):
        table.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_tables_after_fork)


def cache_once(function: Callable[P, R]) -> CachedOnce[P, R]:
    """Run ``function`` once for each distinct argument list and keep the result.

    Keys are typed: ``1``, ``True`` and ``1.0`` differ, also inside tuples. ``f(1)``, ``f(n=1)`` and
    ``f(1, flag=<its default>)`` are one call. Each key has its own lock, so N threads that miss on
    one key run the function once, while different keys run at the same time. A failure is not kept.
    Under ``torch.compile`` the result is a constant of the graph.

    Args:
        function: Pure in its arguments, which must be hashable. Spell hot calls all-positional.

    Returns:
        A callable with ``cache_clear()`` and ``cache_size()``.

    Raises:
        RuntimeError: (on call) the function called itself with the same arguments.
        TypeError: (on call) an argument is not hashable.
    """
    table: _Table[R] = _Table(function)
    results, arity = table.results, table.arity

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs or len(args) != arity:
            key = table.normalise(args, kwargs)  # 3 us; the all-positional spelling avoids it
        else:
            key = tuple(map(_typed, args))
        # One look-up, not `in` and then []: cache_clear may run between two.
        found = results.get(key, _MISSING)
        if found is not _MISSING:
            return cast("R", found)
        return table.compute(key, args, kwargs)

    # Dynamo calls such a function while tracing and burns its result in, instead of tracing into
    # locks and compilers. torch.compiler.assume_constant_result sets the same attribute, but
    # calling it imports torch._dynamo, which costs more than a second at import.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    call.cache_clear = results.clear  # type: ignore[attr-defined]
    call.cache_size = results.__len__  # type: ignore[attr-defined]
    return cast("CachedOnce[P, R]", call)
