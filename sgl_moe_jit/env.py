# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the library, declared once: name, type, default, one line.

Values are read on each use, so a test or a notebook may change them. Nonsense is rejected by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("one of 1/0, true/false, yes/no, on/off")


def _parse_positive_int(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("an integer >= 1")
    return int(text)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _parse_path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises without a HOME


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text.strip().lower()

    return parse


# What os.environ reads: encoded names to encoded values. Looking in here costs 20 ns, os.environ
# 800, and some variables are read on every launch.
environ_texts: Mapping[bytes, bytes] | None = getattr(os.environ, "_data", None)
if not isinstance(environ_texts, dict) or os.name != "posix":
    environ_texts = None


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable.

    Attributes:
        name: The variable's name.
        default: Value when the variable is unset or empty.
        parse: Turns text into a value; raises ``ValueError`` whose text names what is expected.
        doc: One line for the README's table.
    """

    name: str
    default: T
    parse: Callable[[str], T]
    doc: str

    def get(self) -> T:
        """Return the current value.

        Raises:
            ValueError: the text is not of this variable's type; names variable and text.
        """
        if environ_texts is not None and self.name.encode() not in environ_texts:
            return self.default
        text = os.environ.get(self.name, "")
        if not text.strip():
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}: expected {error}, got {text!r}") from None


CACHE_DIR: EnvVar[Path | None] = EnvVar(
    "SGL_MOE_JIT_CACHE_DIR",
    None,
    _parse_path,
    "Folder of built modules. Unset: `$XDG_CACHE_HOME/sgl_moe_jit`, else `~/.cache/sgl_moe_jit`.",
)
CUDA_ARCH: EnvVar[str | None] = EnvVar(
    "SGL_MOE_JIT_CUDA_ARCH",
    None,
    str,
    "CUDA target (`9.0a`), read at a kernel's first load. Unset: the tensor's device decides.",
)
MAX_JOBS: EnvVar[int | None] = EnvVar(
    "SGL_MOE_JIT_MAX_JOBS",
    None,
    _parse_positive_int,
    "Compiler processes side by side in one build. Unset: one a core.",
)
ENABLE_DEFERRED_FINALIZE: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE",
    True,
    _parse_bool,
    "Off: `deferred_finalize_context` asks for nothing; runners finish their own output.",
)
# No cap: the fused finalize was the fastest way at every size measured (docs/deferral.md), and
# what deferral costs in memory is weighed for each call, from its own sizes.
DEFERRED_FINALIZE_MAX_TOKENS: EnvVar[int] = EnvVar(
    "SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS",
    0,
    _parse_int,
    "`SharedExpertMoEBlock` defers up to so many tokens a call. 0 or less: no cap.",
)
# The layers of DeepSeek-V3, Kimi K2 and GLM-4.5 on an H200 (2026-11-30, layer.json): the second
# stream saved 12 to 26 us up to 64 tokens; at 128 it saved one of them 11 and cost two 22 and 29.
DUAL_STREAM_MAX_TOKENS: EnvVar[int] = EnvVar(
    "SGL_MOE_JIT_DUAL_STREAM_MAX_TOKENS",
    64,
    _parse_int,
    "In a capture, the shared experts get a stream of their own up to so many tokens. 0: no cap.",
)
ALL_EXPERTS_MAX_TOKENS: EnvVar[int] = EnvVar(
    "SGL_MOE_JIT_ALL_EXPERTS_MAX_TOKENS",
    128,
    _parse_int,
    "`grouped_mm` may send up to so many tokens through all experts (other rounding). 0: never.",
)
ROUTING_KERNEL: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_ROUTING_KERNEL",
    True,
    _parse_bool,
    "Off: routers choose in plain torch on CUDA too. Same experts, weights to rounding.",
)
CHECK_MUTATION: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_CHECK_MUTATION",
    False,
    _parse_bool,
    "On: catches runners and experts that overwrite their input unannounced (synchronises).",
)
PDL: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_PDL",
    True,
    _parse_bool,
    "Off: never launch with programmatic dependent launch. Same bits.",
)
VECTOR: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_VECTOR",
    True,
    _parse_bool,
    "Off: always take the scalar path. Same bits.",
)
CHECK_INDICES: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_CHECK_INDICES",
    False,
    _parse_bool,
    "On: CUDA calls check every index against the row count (synchronises; not in a capture).",
)
QUICK_CALL: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_QUICK_CALL",
    True,
    _parse_bool,
    "Off: no C extension for eager calls (read at a kernel's first load). Same bits, more time.",
)
CPU_ISA: EnvVar[str] = EnvVar(
    "SGL_MOE_JIT_CPU_ISA",
    "auto",
    _one_of("auto", "portable", "avx2", "avx512"),
    "Instruction set of the CPU kernels: `auto`, `portable`, `avx2` or `avx512`. Same bits.",
)
ENABLE_WATERFILL: EnvVar[bool] = EnvVar(
    "SGL_MOE_JIT_ENABLE_WATERFILL",
    False,
    _parse_bool,
    "On: `SharedExpertFusionConfig.from_environment` sends shared experts where there is room.",
)


FLAG_PDL, FLAG_VECTOR, FLAG_CHECK_INDICES = 1, 2, 4
FLAG_NAMES = tuple(variable.name.encode() for variable in (PDL, VECTOR, CHECK_INDICES))
# (texts, flags) of the last read; replaced whole, so that threads may share it
_last_flags: tuple[Any, int] = (None, 0)


def launch_flags() -> int:
    """Return ``PDL``, ``VECTOR`` and ``CHECK_INDICES`` as bits; parsed when a text has changed.

    Raises:
        ValueError: a text is no yes or no; names variable and text.
    """
    global _last_flags
    texts: Any = None
    if environ_texts is not None:
        get = environ_texts.get
        texts = (get(FLAG_NAMES[0]), get(FLAG_NAMES[1]), get(FLAG_NAMES[2]))
        known, flags = _last_flags
        if texts == known:
            return flags
    flags = FLAG_PDL * PDL.get() + FLAG_VECTOR * VECTOR.get()
    flags += FLAG_CHECK_INDICES * CHECK_INDICES.get()
    _last_flags = (texts, flags)
    return flags


def all_variables() -> tuple[EnvVar[object], ...]:
    """Return every variable declared here, in order of declaration."""
    return tuple(value for value in globals().values() if isinstance(value, EnvVar))
