# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench cpu``: the fused op on a CPU beside torch, and beside a copy of as many bytes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from sgl_moe_jit.bench import finalize, peers
from sgl_moe_jit.bench.cases import FinalizeCase, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.model import finalize_bytes
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record

TOKENS = (1, 8, 64, 256)
COPY = "copy"
_CACHES_SYS = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNKNOWN_CACHE = 64 << 20


def last_level_cache_bytes() -> int:
    """Return the largest cache that the system tells of: ``/sys`` and ``sysconf``, the larger.

    They can differ on a virtual machine: one says what the guest was given, the other what the
    processor has, and it is the processor's that keeps the lines.
    """
    sizes = [0]
    for path in _CACHES_SYS.glob("index*/size"):
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="utf-8").strip())
            if match:
                sizes.append(int(match[1]) * _UNITS[match[2]])
    for name in ("SC_LEVEL2_CACHE_SIZE", "SC_LEVEL3_CACHE_SIZE", "SC_LEVEL4_CACHE_SIZE"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(os.sysconf(name))
    return max(sizes) or _UNKNOWN_CACHE


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, and never map it anew, so that torch is taken at its best.

    Otherwise its temporaries are mapped page by page on every call.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def copying(case: FinalizeCase, inputs: Sequence[FinalizeInputs]) -> Contestant:
    """Return torch's ``copy_`` of half of the op's bytes: as many read as written, in all the same.

    With buffers of its own, as many as the op has, and the same threads.
    """
    num_tokens = inputs[0].out.shape[0]
    half = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4) // 2
    source = torch.ones(len(inputs), half, dtype=torch.uint8)
    target = torch.empty_like(source).fill_(0)  # zeros_like could leave its pages unmapped
    calls = [functools.partial(target[i].copy_, source[i]) for i in range(len(inputs))]

    def check() -> None:
        calls[0]()
        if not torch.equal(source[0], target[0]):
            raise WrongResultError(f"{COPY}: the target differs from the source")

    return Contestant(calls, check)


def entries() -> dict[str, Callable[[], finalize.Entry]]:
    """Return what makes each provider of the subject, by name."""
    one = {"sgl_moe_jit": peers.ours, "torch": peers.torch_eager, "torch bmm": peers.torch_bmm}

    def entry(name: str) -> finalize.Entry:
        return functools.partial(finalize.enter, name, peers.each(one[name]))

    found = {name: functools.partial(entry, name) for name in one}
    return {**found, COPY: lambda: copying}


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another, buffers rotated past four times the cache."""
    keep_freed_memory()
    made = contest.prepare(options.choose(entries()))
    cache = last_level_cache_bytes()
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
            copies = 4 * cache // size + 1
            inputs = make_finalize_inputs(case, num_tokens, copies, device="cpu")
            outcomes = contest.on_cpu(
                f"{case.name}, {num_tokens} tokens",
                {name: functools.partial(entry, case, inputs) for name, entry in made.items()},
            )
            del inputs
            yield [
                Record.of("cpu", case, num_tokens, "cold", name, outcome, size, cache)
                for name, outcome in outcomes.items()
            ]
