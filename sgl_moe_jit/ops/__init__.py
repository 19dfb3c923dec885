# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels as torch ops: CUDA and CPU, fake, autograd. Importing compiles nothing."""

import sgl_moe_jit.ops.route_topk  # noqa: F401 - registers its modules
from sgl_moe_jit.ops.activation import silu_and_mul
from sgl_moe_jit.ops.expand_topk import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
)
from sgl_moe_jit.ops.finalize import moe_finalize_fuse_shared
from sgl_moe_jit.ops.finalize_norm import (
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
)
from sgl_moe_jit.ops.permute import moe_permute
from sgl_moe_jit.ops.waterfill import waterfill_topk_with_shared_expert

__all__ = [
    "count_tokens_per_rank",
    "expand_topk_with_shared_expert",
    "moe_finalize_fuse_shared",
    "moe_finalize_fuse_shared_add_rmsnorm",
    "moe_finalize_fuse_shared_add_rmsnorm_fp8",
    "moe_permute",
    "silu_and_mul",
    "waterfill_topk_with_shared_expert",
]
