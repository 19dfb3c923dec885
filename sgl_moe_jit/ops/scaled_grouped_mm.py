# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""torch's ``scaled_grouped_mm`` of FP8 rows by FP8 experts, also traceable by ``torch.compile``."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.ops.library import NAMESPACE, from_dispatcher, has_no_values, library

OP = "scaled_grouped_mm"


def why_unavailable(device: torch.device) -> str:
    """Say why torch's FP8 grouped GEMM with scales by row cannot run on a device; "" if it can.

    Starts nothing; asks the driver on CUDA only. torch 2.10 made the function public. Its kernel
    for scales by row is compiled for compute capability 9.0 alone, in 2.13 too, although its check
    lets 10.0 pass; builds for the CPU and for ROCm's number format have none.
    """
    if not hasattr(torch.nn.functional, OP):
        return f"torch {torch.__version__} has no torch.nn.functional.{OP}; needs 2.10"
    needs = f"device: torch's {OP} with scales by row needs compute capability 9.0"
    if device.type != "cuda":
        return f"{needs}, got {device.type}"
    if torch.version.cuda is None:
        return f"{needs}, this torch is built for another maker's GPU"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"{needs}, got {'.'.join(map(str, capability))}"
    return ""


def _functional(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, offsets: Tensor
) -> Tensor:
    by_row = torch.nn.functional.ScalingType.RowWise
    # Hopper's FP8 unit keeps about 14 bits while it accumulates (DeepSeek-V3 report, 3.3.2). With
    # "fast" accumulation off the kernel adds its sums up in float32 every few instructions.
    result: Tensor = torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        x,
        weight,
        x_scales,
        by_row,
        weight_scales,
        by_row,
        offs=offsets,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return result


def _fake(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, offsets: Tensor
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]), dtype=torch.bfloat16)


library.define(
    f"{OP}(Tensor x, Tensor weight, Tensor x_scales, Tensor weight_scales, Tensor offsets)"
    " -> Tensor"
)
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)


def scaled_grouped_mm(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, offsets: Tensor
) -> Tensor:
    """Multiply each expert's rows with that expert's matrix, both float8_e4m3fn.

    ``out[p] = (x[p] @ weight[e]) * x_scales[p] * weight_scales[e]``, rounded once.

    Args:
        x: [P, N], rows grouped by expert, adjacent columns.
        weight: [E, N, M], each column's elements adjacent.
        x_scales: [P] float32, contiguous.
        weight_scales: [E, M] float32, adjacent columns.
        offsets: [E] int32, the end of each expert's rows.

    Returns:
        [P, M] bfloat16; rows at and beyond ``offsets[-1]`` are not written.

    Limits are torch's: N and M multiples of 16, rows and matrices that start on multiples of 16
    bytes, E below 1024, and a device of :func:`why_unavailable`. No gradient.
    """
    # torch 2.13 has no shape rule for its own op. Opaque, ours can be traced.
    if has_no_values(x, weight):
        result: Tensor = torch.ops.sgl_moe_jit.scaled_grouped_mm(
            x, weight, x_scales, weight_scales, offsets
        )
        return result
    return _functional(x, weight, x_scales, weight_scales, offsets)
