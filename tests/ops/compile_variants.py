# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What there is to compile: every device source of every registered module, in batches."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import sgl_moe_jit.ops  # noqa: F401 - registers the shipped kernels
from sgl_moe_jit.jit import BuildSpec, CudaArch, families, parallel, paths

ARCHS = tuple(CudaArch.parse(name) for name in ("sm_80", "sm_90a", "sm_100a", "sm_120f"))
# Variants in one call, at most, and how many are worth a call of their own.
MOST_VARIANTS, FEW_VARIANTS = 16, 8

Macro = tuple[str, str]  # name and value


@dataclass(frozen=True)
class Variant:
    """One device source as one module compiles it.

    Attributes:
        label: The module's name.
        source: The file.
        flags: Without macros, target and outputs.
        macros: Those of the command line.
        archs: The targets that the module is registered for.
    """

    label: str
    source: Path
    flags: tuple[str, ...]
    macros: tuple[Macro, ...]
    archs: tuple[CudaArch, ...]


Batch = tuple[Variant, ...]  # of one source, different in their macros only


def variants_of(specs: Iterable[BuildSpec]) -> list[Variant]:
    """Return the device sources of modules, each once for all targets that compile it alike."""
    found: dict[tuple[str, Path, tuple[str, ...]], list[CudaArch]] = {}
    for spec in specs:
        roots = dict(spec.roots)
        for unit in spec.units:
            if unit.command[0] != "{nvcc}":
                continue
            assert unit.text is None, f"{spec.label}: a generated source, which no batch can hold"
            assert spec.arch is not None
            flags = []
            for word in unit.command[1 : unit.command.index("-MD")]:
                root = re.search(r"roots/(\w+)", word)
                if word != spec.arch.gencode():
                    flags.append(
                        word.replace(root.group(), str(roots[root.group(1)])) if root else word
                    )
            _, name, path = unit.source.split("/", 2)
            found.setdefault((spec.label, roots[name] / path, tuple(flags)), []).append(spec.arch)
    return [
        Variant(
            label,
            source,
            tuple(flag for flag in flags if not _is_macro(flag)),
            tuple(_macro(flag) for flag in flags if _is_macro(flag)),
            tuple(archs),
        )
        for (label, source, flags), archs in found.items()
    ]


def _is_macro(flag: str) -> bool:
    return re.match(r"-D\w", flag) is not None


def _macro(flag: str) -> Macro:
    name, equals, value = flag.removeprefix("-D").partition("=")
    return name, value if equals else "1"


def registered_variants(archs: Iterable[CudaArch]) -> list[Variant]:
    """Return every device source of every registered module."""
    return variants_of(
        spec for arch in archs for family in families() for spec in family.cuda_specs(arch)
    )


def make_batches(variants: Iterable[Variant]) -> list[Batch]:
    """Group variants by all but their macros, and cut each group into equal shares."""
    groups: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.source, variant.flags, variant.archs), []).append(variant)
    batches: list[Batch] = []
    for group in groups.values():
        count = calls = len(group)
        if can_share_headers(group):
            calls = max(-(-count // MOST_VARIANTS), min(parallel.max_jobs(), count // FEW_VARIANTS))
        cuts = [i * count // calls for i in range(calls + 1)]
        batches += [tuple(group[i:j]) for i, j in pairwise(cuts)]
    return batches


@functools.cache
def all_batches() -> list[Batch]:
    """Return the batches of all registered modules for all common targets."""
    return make_batches(registered_variants(ARCHS))


def batch_id(batch: Batch) -> str:
    """Return a test's name."""
    return batch[0].label if len(batch) == 1 else f"{batch[0].label}..{batch[-1].label}"


def can_share_headers(variants: Iterable[Variant]) -> bool:
    """Whether no header that the source includes names one of its macros."""
    variants = list(variants)
    names = {name for variant in variants for name, _ in variant.macros}
    return not any(
        names & set(re.findall(r"\w+", header.read_text(encoding="utf-8")))
        for header in _own_headers(variants[0].source)
    )


def included_names(text: str) -> list[str]:
    """Return what a source includes, with its quotes or angle brackets."""
    return re.findall(r'^\s*#\s*include\s*("[^"]+"|<[^>]+>)', text, re.MULTILINE)


def _own_headers(source: Path) -> set[Path]:
    seen: set[Path] = set()
    queue = [source]
    while queue:
        path = queue.pop()
        for name in included_names(path.read_text(encoding="utf-8")):
            for base in (path.parent, paths.include_dir(), paths.csrc_dir()):
                header = base / name[1:-1]
                if header.is_file() and header not in seen:
                    seen.add(header)
                    queue.append(header)
    return seen
