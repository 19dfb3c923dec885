# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Who computes finalize, residual add and RMSNorm: in one kernel, in two, or in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.bench import kernels
from sgl_moe_jit.bench.cases import FinalizeInputs
from sgl_moe_jit.bench.norm_inputs import EPS, NormCall, NormInputs, Provider
from sgl_moe_jit.bench.timing import Call
from sgl_moe_jit.jit import current_arch, load_spec, parallel
from sgl_moe_jit.ops import moe_finalize_fuse_shared
from sgl_moe_jit.ops.finalize_norm import (
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
)
from sgl_moe_jit.ops.finalize_norm_kernel import cuda_spec


def each(one: Callable[[NormInputs, int], NormCall]) -> Provider:
    """Return the provider that treats every set of buffers alike."""
    return lambda inputs, top_k: [one(x, top_k) for x in inputs]


def _build(top_ks: Sequence[int], fp8: bool) -> None:
    arch = current_arch()
    parallel.run_all(lambda top_k: load_spec(cuda_spec(torch.bfloat16, top_k, fp8, arch)), top_ks)


def ours(x: NormInputs, top_k: int) -> NormCall:
    """This library's one kernel."""
    run = functools.partial(
        moe_finalize_fuse_shared_add_rmsnorm,
        x.base.gemm2_out,
        x.base.expanded_idx_to_permuted_idx,
        x.base.expert_weights,
        x.base.shared_output,
        top_k,
        x.residual,
        x.weight,
        EPS,
        out=x.base.out,
        residual_out=x.residual_out,
    )
    return NormCall(run, x.base.out, x.residual_out)


def ours_in_place(x: NormInputs, top_k: int) -> NormCall:
    """The same with the residual overwritten, as an engine's two kernels do; see two_kernels."""
    residual = x.residual.clone()
    return ours(replace(x, residual=residual, residual_out=residual), top_k)


def ours_fp8(x: NormInputs, top_k: int) -> NormCall:
    """The same with its result in FP8, half of its bytes."""
    out = torch.empty_like(x.base.out, dtype=torch.float8_e4m3fn)
    scale = torch.empty(out.shape[0], 1, dtype=torch.float32, device=out.device)
    run = functools.partial(
        moe_finalize_fuse_shared_add_rmsnorm_fp8,
        x.base.gemm2_out,
        x.base.expanded_idx_to_permuted_idx,
        x.base.expert_weights,
        x.base.shared_output,
        top_k,
        x.residual,
        x.weight,
        EPS,
        out=out,
        out_scale=scale,
        residual_out=x.residual_out,
    )
    return NormCall(run, out, x.residual_out, scale)


def two_kernels(finalize: Callable[[FinalizeInputs, int], Call], add_rmsnorm: Any) -> Provider:
    """Return a finalize followed by an add-RMSNorm in place.

    The second kernel overwrites the finalize's output and the residual, as in an engine, so the
    provider has a residual of its own. Each replay adds to it: what is checked is the first call,
    what is timed adds ever larger values, which stay finite and take as long. It so has one buffer
    of [T, H] less in rotation than a kernel that leaves its input alone.
    """

    def one(x: NormInputs, top_k: int) -> NormCall:
        first = finalize(x.base, top_k)
        residual = x.residual.clone()

        def run() -> object:
            first()
            return add_rmsnorm(x.base.out, residual, x.weight, EPS)

        return NormCall(run, x.base.out, residual)

    return each(one)


def our_finalize(x: FinalizeInputs, top_k: int) -> Call:
    """This library's finalize without the norm."""
    return functools.partial(
        moe_finalize_fuse_shared,
        x.gemm2_out,
        x.expanded_idx_to_permuted_idx,
        x.expert_weights,
        x.shared_output,
        top_k,
        out=x.out,
    )


def sglang_finalize(folder: Path) -> Callable[[FinalizeInputs, int], Call]:
    """Return sglang's finalize, launched with PDL."""
    kernel = kernels.sglang_finalize(str(folder))

    def one(x: FinalizeInputs, top_k: int) -> Call:
        rows = x.expanded_idx_to_permuted_idx.view(-1)
        return functools.partial(
            kernel, x.out, x.gemm2_out, rows, x.expert_weights, x.shared_output, top_k, True
        )

    return one


def _expression(
    gemm2_out: Tensor,
    idx: Tensor,
    weights: Tensor,
    shared: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    out: Tensor,
    residual_out: Tensor,
) -> None:
    terms = gemm2_out[idx, : out.shape[1]].float() * weights[..., None]
    total = terms.sum(1) + shared + residual
    residual_out.copy_(total)
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    out.copy_(total * scale * norm_weight)


def in_torch(compiled: bool) -> Provider:
    """Return the torch expression, as it stands or compiled for exactly one shape."""

    def provider(inputs: Sequence[NormInputs], top_k: int) -> list[NormCall]:
        function: Callable[..., object] = _expression
        if compiled:  # see peers.torch_compiled
            torch.compiler.reset()
            function = torch.compile(_expression, dynamic=False, fullgraph=True)
            torch._dynamo.maybe_mark_dynamic(inputs[0].base.gemm2_out, 0)

        def one(x: NormInputs) -> NormCall:
            run = functools.partial(
                function,
                x.base.gemm2_out,
                x.base.expanded_idx_to_permuted_idx.long(),
                x.base.expert_weights,
                x.base.shared_output,
                x.residual,
                x.weight,
                x.base.out,
                x.residual_out,
            )
            return NormCall(run, x.base.out, x.residual_out)

        return [one(x) for x in inputs]

    return provider


def providers(
    folders: Mapping[str, Path], top_ks: Sequence[int]
) -> dict[str, Callable[[], Provider]]:
    """Return what makes each provider, by name, ours first.

    ``sglang+rmsnorm`` ends with flashinfer's add-RMSNorm; without flashinfer's sources with a plain
    one of ours, and the name says so.
    """

    def built(one: Callable[[NormInputs, int], NormCall], fp8: bool) -> Provider:
        _build(top_ks, fp8)
        return each(one)

    makers: dict[str, Callable[[], Provider]] = {
        "sgl_moe_jit": lambda: built(ours, fp8=False),
        "sgl_moe_jit, in place": lambda: built(ours_in_place, fp8=False),
        "sgl_moe_jit, FP8 out": lambda: built(ours_fp8, fp8=True),
        "sgl_moe_jit, two kernels": lambda: two_kernels(our_finalize, kernels.add_rmsnorm()),
    }
    if "sglang" in folders:
        sources = folders["sglang"]
        if "flashinfer" in folders:
            flashinfer = str(folders["flashinfer"])
            makers["sglang+rmsnorm"] = lambda: two_kernels(
                sglang_finalize(sources), kernels.flashinfer_add_rmsnorm(flashinfer)
            )
        else:
            makers["sglang+rmsnorm (ours)"] = lambda: two_kernels(
                sglang_finalize(sources), kernels.add_rmsnorm()
            )
    makers["torch"] = lambda: in_torch(compiled=False)
    makers["torch.compile"] = lambda: in_torch(compiled=True)
    return makers
