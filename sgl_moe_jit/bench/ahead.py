# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Building shipped kernels ahead of use: for images, and machines without a compiler."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import sgl_moe_jit.ops  # noqa: F401 - registers the shipped kernels
from sgl_moe_jit import env
from sgl_moe_jit.errors import SglMoeJitError, ToolchainError
from sgl_moe_jit.jit import BuildSpec, CudaArch, current_arch, families, load_spec, parallel, paths
from sgl_moe_jit.ops import quick_call

logger = logging.getLogger("sgl_moe_jit.bench")

# The targets of the public GPUs most in use: A100, H100/H200, B200, RTX 50 and RTX PRO.
COMMON_TARGETS = ("8.0", "9.0a", "10.0a", "12.0f")

Target = CudaArch | None  # None: the CPU


@dataclass(frozen=True)
class TargetResult:
    """What became of one target's modules.

    Attributes:
        target: ``cpu`` or a CUDA target's name.
        ready: Modules that are in the cache now.
        failures: ``label: first line of the error`` of the others.
        seconds: For this target.
    """

    target: str
    ready: int
    failures: tuple[str, ...]
    seconds: float

    def line(self) -> str:
        """Return one line for a reader."""
        total = self.ready + len(self.failures)
        text = f"{self.target}: {self.ready} of {total} modules ready in {paths.cache_root()}"
        return f"{text} ({self.seconds:.1f} s)"


def choose_targets(arch: str | None, cpu: bool, every: bool) -> list[Target]:
    """Return what to build for; nothing named means what this machine can run.

    Args:
        arch: CUDA targets, separated by commas.
        cpu: The CPU too.
        every: The CPU and the common CUDA targets too.

    Raises:
        ValueError: a target does not exist.
    """
    targets: list[Target] = [None] if cpu or every else []
    if arch is not None:
        targets += [CudaArch.parse(text) for text in arch.split(",")]
    if every:
        targets += [CudaArch.parse(text) for text in COMMON_TARGETS]
    if not targets:
        targets = [None]
        if torch.cuda.is_available() or env.CUDA_ARCH.get() is not None:
            targets.append(current_arch())
    return list(dict.fromkeys(targets))


def specs_for(target: Target) -> list[BuildSpec]:
    """Return every shipped module of a target, once: ops may share one."""
    specs: dict[str, BuildSpec] = {}
    for family in families():
        for spec in family.cpu_specs() if target is None else family.cuda_specs(target):
            specs.setdefault(spec.label, spec)
    return list(specs.values())


def _failure_of(spec: BuildSpec) -> tuple[str, str | None] | None:
    """Return the failure's line, and what is missing if that would fail every module alike."""
    missing = None
    try:
        load_spec(spec)
    except ToolchainError as error:
        missing = text = str(error).removeprefix(f"{spec.label} is to be compiled: ")
    except (SglMoeJitError, OSError) as error:
        text = str(error).removeprefix(f"{spec.label}: ")
        logger.error("%s: %s", spec.label, text)
    else:
        return None
    return f"{spec.label}: {text.splitlines()[0]}", missing


def build(targets: Sequence[Target]) -> list[TargetResult]:
    """Have every module of the targets in the cache. A failure does not stop the rest.

    So is the extension for eager calls, without which they work too.
    """
    results = []
    for target in targets:
        started = time.perf_counter()
        specs = specs_for(target)
        found = [failure for failure in parallel.run_all(_failure_of, specs) if failure]
        seconds = time.perf_counter() - started
        name = "cpu" if target is None else target.name
        for missing in dict.fromkeys(missing for _, missing in found if missing):
            logger.error("%s: %s", name, missing)  # once, not once a module
        failures = tuple(line for line, _ in found)
        results.append(TargetResult(name, len(specs) - len(failures), failures, seconds))
    why = quick_call.build()
    if why is not None:
        logger.info("eager calls will stay in Python: %s", why)
    return results


def warmup(arch: str | None = None) -> None:
    """Build the shipped kernels now, side by side: before a server's watchdog runs, or a capture.

    At most ``SGL_MOE_JIT_MAX_JOBS`` compilers at a time. What the cache holds starts none.

    Args:
        arch: CUDA targets such as ``"9.0a,10.0a"``; None: the kernels that this machine can run, on
            its CPU and its GPU.

    Raises:
        TypeError: ``arch`` is no string.
        ValueError: a target does not exist.
        SglMoeJitError: some kernels could not be built, after all others were; names each.
    """
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"arch: expected a string or None, got {type(arch).__name__}")
    results = build(choose_targets(arch, cpu=False, every=False))
    failures = [f"{result.target}: {failure}" for result in results for failure in result.failures]
    if failures:
        raise SglMoeJitError("kernels that could not be built:\n  " + "\n  ".join(failures))
