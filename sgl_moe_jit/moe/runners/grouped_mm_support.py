# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers the ``grouped_mm`` runner can serve, and why not the others."""

from __future__ import annotations

import torch

from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import Support
from sgl_moe_jit.ops import scaled_grouped_mm
from sgl_moe_jit.ops.permute import MAX_EXPERTS

DTYPES = (torch.bfloat16, torch.float32)
# torch's CUDA kernel: "Can't process more than 1024 groups", and it means fewer than that.
_MAX_CUDA_EXPERTS = 1023


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _supports_fp8(config: RunnerConfig) -> Support:
    why = scaled_grouped_mm.why_unavailable(config.device)
    if why:
        return Support(False, why)
    if config.is_transposed:
        return Support(
            False,
            "is_transposed: torch's scaled_grouped_mm reads [E, 2I, H] and [E, H, I], the layout "
            "without is_transposed",
        )
    sizes = f"hidden_dim {config.hidden_dim}, intermediate_dim {config.intermediate_dim}"
    if not config.aligned_16_bytes or config.hidden_dim % 16 or config.intermediate_dim % 16:
        return Support(
            False,
            "strides: torch's scaled_grouped_mm needs sizes that are multiples of 16 and rows that "
            f"start on multiples of 16 bytes; got {sizes}",
        )
    if config.num_experts > _MAX_CUDA_EXPERTS:
        return Support(False, f"num_experts: at most {_MAX_CUDA_EXPERTS}, got {config.num_experts}")
    return Support(True, "torch.nn.functional.scaled_grouped_mm, scales by row")


def supports(config: RunnerConfig) -> Support:
    """Say whether this runner can serve a layer. Starts nothing; asks the driver on CUDA only."""
    if config.quantization is Quantization.FP8_PER_CHANNEL:
        return _supports_fp8(config)

    def no(why: str) -> Support:
        return Support(False, why)

    if not hasattr(torch.nn.functional, "grouped_mm"):
        return no(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm; needs 2.10")
    if config.dtype not in DTYPES:
        return no(f"dtype: needs bfloat16 or float32, got {_name(config.dtype)}")
    item = config.dtype.itemsize
    aligned = config.hidden_dim * item % 16 == 0 and config.intermediate_dim * item % 16 == 0
    if not (config.aligned_16_bytes and aligned):
        return no(
            "strides: torch's grouped_mm needs matrix rows that start on multiples of 16 bytes; "
            f"got hidden_dim {config.hidden_dim}, intermediate_dim {config.intermediate_dim} "
            f"in {_name(config.dtype)}"
        )
    limit = _MAX_CUDA_EXPERTS if config.device.type == "cuda" else MAX_EXPERTS
    if config.num_experts > limit:
        return no(f"num_experts: at most {limit}, got {config.num_experts}")
    if config.device.type == "cuda":
        if torch.version.cuda is None:
            return no("device: needs an NVIDIA GPU, this torch is built for another")
        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(config.device)
            if capability < (8, 0):
                found = ".".join(map(str, capability))
                return no(f"device: needs compute capability 8.0 or newer, got {found}")
    elif config.device.type != "cpu":
        return no(f"device: needs cpu or cuda, got {config.device.type}")
    return Support(True)
