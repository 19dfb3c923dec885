# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The registry of shipped kernels: the modules each op can ask for, so that all can be prebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sgl_moe_jit.jit.arch import CudaArch
from sgl_moe_jit.jit.spec import BuildSpec


@dataclass(frozen=True)
class KernelFamily:
    """The modules of one op.

    Attributes:
        name: The op's name.
        cuda_specs: Every CUDA module for a target.
        cpu_specs: Every CPU module.
    """

    name: str
    cuda_specs: Callable[[CudaArch], Iterator[BuildSpec]]
    cpu_specs: Callable[[], Iterator[BuildSpec]]


_families: dict[str, KernelFamily] = {}


def register_family(family: KernelFamily) -> None:
    """Add an op's modules. A second registration of a name replaces the first."""
    _families[family.name] = family


def families() -> tuple[KernelFamily, ...]:
    """Return the registered families; import ``sgl_moe_jit.ops`` first to have the shipped ones."""
    return tuple(_families.values())
