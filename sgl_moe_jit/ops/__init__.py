# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels as torch ops: CUDA and CPU, fake, autograd. Importing compiles nothing."""

from sgl_moe_jit.ops.finalize import moe_finalize_fuse_shared

__all__ = ["moe_finalize_fuse_shared"]
