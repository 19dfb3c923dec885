# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo's finalize at DeepSeek-V3 width: the fused op against plain torch operations."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_moe_jit.bench import timing
from sgl_moe_jit.bench.cases import CASES, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.model import finalize_bytes, separate_finalize_bytes
from sgl_moe_jit.ops import moe_finalize_fuse_shared, reference

_CASE = CASES["deepseek-v3"]
_CPU_COPIES, _CPU_ROUNDS = 4, 60
_CHECKED_TOKENS = 256


@dataclass(frozen=True)
class FinalizeResult:
    """Times of one token count.

    Attributes:
        num_tokens: T.
        fused_us, fused_p20_us, fused_p80_us: Median and spread of a fused call.
        separate_us, separate_p20_us, separate_p80_us: Of the separate expression.
        bytes: What one fused call must move: each input once, the output once.
        separate_bytes: What finalize, then add must move; torch's temporaries come on top.
        within_tolerance: Whether the fused values of the first 256 tokens lay within the rounding
            bound of float64.
        mode: ``cold`` (buffers rotated past three times the L2) or ``rotating`` (4 buffers, CPU).
    """

    num_tokens: int
    fused_us: float
    fused_p20_us: float
    fused_p80_us: float
    separate_us: float
    separate_p20_us: float
    separate_p80_us: float
    bytes: int
    separate_bytes: int
    within_tolerance: bool
    mode: str


def fused(x: FinalizeInputs) -> Tensor:
    """Return the fused op's output."""
    return moe_finalize_fuse_shared(
        x.gemm2_out, x.expanded_idx_to_permuted_idx, x.expert_weights, x.shared_output, _CASE.top_k
    )


def separate(gemm2_out: Tensor, idx: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """Return the same from separate torch operations; ``idx`` is int64, ready for indexing."""
    routed = (gemm2_out[idx].float() * weights[..., None]).sum(1).to(gemm2_out.dtype)
    return routed + shared


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for this process instead of returning it to the system.

    Otherwise the separate expression's 15 MB temporaries are mapped anew, page by page, on every
    call, unless an earlier allocation happens to prevent it: 17 to 23 ms against 3.5 ms on one
    thread (EPYC virtual machine, 2026-11-29). The comparison takes the baseline at its best.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # the largest glibc accepts
        libc.mallopt(trim_threshold, 1 << 30)


def _within_tolerance(x: FinalizeInputs) -> bool:
    # Float64 copies of every row would fill a small GPU; the first tokens' rows do not.
    count = min(x.expert_weights.shape[0], _CHECKED_TOKENS)
    rows = x.gemm2_out[x.expanded_idx_to_permuted_idx[:count].reshape(-1).long()]
    idx = torch.arange(rows.shape[0], device=rows.device)
    arguments = (rows, idx, x.expert_weights[:count], x.shared_output[:count], _CASE.top_k)
    error = fused(x)[:count].double() - reference.moe_finalize_fuse_shared(*arguments)
    return bool((error.abs() <= reference.finalize_tolerance(*arguments)).all())


def time_finalize(num_tokens: int, device: torch.device) -> FinalizeResult:
    """Check the fused op against float64, then time it and the separate expression in turn."""
    num_bytes = finalize_bytes(num_tokens, _CASE.top_k, _CASE.hidden_dim, 2, 4)
    on_gpu = device.type == "cuda"
    copies = _CPU_COPIES
    if on_gpu:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = timing.copies_for_cold(num_bytes, cache_bytes, at_least=1)
    inputs = make_finalize_inputs(_CASE, num_tokens, copies, device=device)
    calls: dict[str, list[timing.Call]] = {"fused": [], "separate": []}
    for x in inputs:
        calls["fused"].append(functools.partial(fused, x))
        idx = x.expanded_idx_to_permuted_idx.long()
        calls["separate"].append(
            functools.partial(separate, x.gemm2_out, idx, x.expert_weights, x.shared_output)
        )
    correct = _within_tolerance(inputs[0])
    if on_gpu:
        graphs = {name: (timing.capture(c), len(c)) for name, c in calls.items()}
        times = timing.time_graphs(graphs)
    else:
        keep_freed_memory()
        times = timing.time_cpu(calls, rounds=_CPU_ROUNDS)
    ours, theirs = times["fused"], times["separate"]
    return FinalizeResult(
        num_tokens=num_tokens,
        fused_us=ours.median_us,
        fused_p20_us=ours.p20_us,
        fused_p80_us=ours.p80_us,
        separate_us=theirs.median_us,
        separate_p20_us=theirs.p20_us,
        separate_p80_us=theirs.p80_us,
        bytes=num_bytes,
        separate_bytes=separate_finalize_bytes(num_tokens, _CASE.top_k, _CASE.hidden_dim, 2, 4),
        within_tolerance=correct,
        mode="cold" if on_gpu else "rotating",
    )
