# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of an op that has one for CUDA and one for the CPU, without variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgl_moe_jit.jit import BuildSpec, CudaArch, KernelFamily, make_spec, register_family


class SingleModule(NamedTuple):
    """How to build an op's two modules.

    Attributes:
        cuda: For a target.
        cpu: For this machine.
    """

    cuda: Callable[[CudaArch], BuildSpec]
    cpu: Callable[[], BuildSpec]


def register_single(op: str, name: str) -> SingleModule:
    """Register an op whose sources are ``csrc/moe/<name>.cu``, ``_binding.cc`` and ``_cpu.cc``."""

    def cuda(arch: CudaArch) -> BuildSpec:
        return make_spec(
            (name,),
            cuda_files=[f"moe/{name}.cu"],
            cpp_files=[f"moe/{name}_binding.cc"],
            arch=arch,
        )

    def cpu() -> BuildSpec:
        return make_spec((name, "cpu"), cpp_files=[f"moe/{name}_cpu.cc"])

    register_family(KernelFamily(op, lambda arch: iter([cuda(arch)]), lambda: iter([cpu()])))
    return SingleModule(cuda, cpu)
