# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The JIT runtime, in order of dependency; each module imports only those before it.

``memo`` one result a typed call · ``paths`` sources and cache folder · ``arch`` CUDA targets ·
``toolchain`` compilers · ``dependencies`` CUTLASS headers · ``spec`` what is to be built ·
``parallel`` jobs side by side · ``build`` one build · ``manifest`` what it was made from ·
``cache`` which built module is still exact · ``loader`` ``load_jit`` · ``extension`` modules for
Python itself · ``variants`` the registry of shipped kernels.
"""

from sgl_moe_jit.jit.arch import CudaArch, arch_of_capability, current_arch
from sgl_moe_jit.jit.extension import load_extension, why_no_extension
from sgl_moe_jit.jit.loader import load_jit, load_spec
from sgl_moe_jit.jit.memo import cache_once
from sgl_moe_jit.jit.spec import BuildSpec, make_spec
from sgl_moe_jit.jit.variants import KernelFamily, families, register_family

__all__ = [
    "BuildSpec",
    "CudaArch",
    "KernelFamily",
    "arch_of_capability",
    "cache_once",
    "current_arch",
    "families",
    "load_extension",
    "load_jit",
    "load_spec",
    "make_spec",
    "register_family",
    "why_no_extension",
]
