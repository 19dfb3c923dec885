# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Who computes a finalize beside us, in one process: sglang, flashinfer and torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from sgl_moe_jit.bench import kernels
from sgl_moe_jit.bench.cases import FinalizeInputs
from sgl_moe_jit.bench.timing import Call
from sgl_moe_jit.jit import current_arch, load_spec, parallel
from sgl_moe_jit.ops import moe_finalize_fuse_shared
from sgl_moe_jit.ops.finalize_kernel import cuda_spec

# Makes the calls of one shape, one for each set of buffers; a call writes ``out``.
Provider = Callable[[Sequence[FinalizeInputs], int], list[Call]]


def each(one: Callable[[FinalizeInputs, int], Call]) -> Provider:
    """Return the provider that treats every set of buffers alike."""
    return lambda inputs, top_k: [one(x, top_k) for x in inputs]


def ours(inputs: FinalizeInputs, top_k: int) -> Call:
    """This library's op, writing into ``out``."""
    return lambda: moe_finalize_fuse_shared(
        inputs.gemm2_out,
        inputs.expanded_idx_to_permuted_idx,
        inputs.expert_weights,
        inputs.shared_output,
        top_k,
        out=inputs.out,
    )


def build_ours(top_ks: Sequence[int]) -> Provider:
    """Build the modules of these top_k side by side; return our provider."""
    arch = current_arch()
    parallel.run_all(
        lambda top_k: load_spec(cuda_spec(torch.bfloat16, torch.float32, top_k, arch)), top_ks
    )
    return each(ours)


def torch_eager(inputs: FinalizeInputs, top_k: int) -> Call:
    """What is written without a kernel: gather, scale, sum, add."""
    width = inputs.out.shape[1]
    rows = inputs.expanded_idx_to_permuted_idx.long()

    def call() -> object:
        terms = inputs.gemm2_out[rows, :width].float() * inputs.expert_weights[..., None]
        return inputs.out.copy_(terms.sum(1) + inputs.shared_output)

    return call


def torch_compiled(inputs: Sequence[FinalizeInputs], top_k: int) -> list[Call]:
    """The same expression, compiled for exactly this shape.

    Static but for the pool's rows, which differ between hot and cold: otherwise each token count
    would be compiled twice.
    """

    def expression(
        gemm2_out: torch.Tensor,
        idx: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        terms = gemm2_out[idx, : out.shape[1]].float() * weights[..., None]
        out.copy_(terms.sum(1) + shared)

    torch.compiler.reset()  # Dynamo compiles one function for eight shapes at most
    compiled = torch.compile(expression, dynamic=False, fullgraph=True)
    torch._dynamo.maybe_mark_dynamic(inputs[0].gemm2_out, 0)

    def call_of(x: FinalizeInputs) -> Call:
        idx = x.expanded_idx_to_permuted_idx.long()
        return lambda: compiled(x.gemm2_out, idx, x.expert_weights, x.shared_output, x.out)

    return [call_of(x) for x in inputs]


def torch_bmm(inputs: FinalizeInputs, top_k: int) -> Call:
    """The same as one batched matrix product, in the activations' dtype."""
    width = inputs.out.shape[1]
    rows = inputs.expanded_idx_to_permuted_idx.long()

    def call() -> object:
        gathered = inputs.gemm2_out[rows, :width]
        weights = inputs.expert_weights.to(gathered.dtype)[:, None]
        return inputs.out.copy_(torch.bmm(weights, gathered)[:, 0] + inputs.shared_output)

    return call


def sglang(folder: Path) -> Provider:
    """Return sglang's fused kernel, launched with PDL as its engine does."""
    kernel = kernels.sglang_finalize(str(folder))

    def call_of(x: FinalizeInputs, top_k: int) -> Call:
        rows = x.expanded_idx_to_permuted_idx.view(-1)
        return lambda: kernel(
            x.out, x.gemm2_out, rows, x.expert_weights, x.shared_output, top_k, True
        )

    return each(call_of)


def flashinfer_add(folder: Path) -> Provider:
    """Return flashinfer's finalize (PDL), then torch's add, as an engine without deferral does."""
    kernel = kernels.flashinfer_finalize(str(folder))

    def call_of(x: FinalizeInputs, top_k: int) -> Call:
        def call() -> object:
            kernel(x.out, x.gemm2_out, x.expanded_idx_to_permuted_idx, x.expert_weights)
            return x.out.add_(x.shared_output)

        return call

    return each(call_of)


def providers(
    folders: Mapping[str, Path], top_ks: Sequence[int]
) -> dict[str, Callable[[], Provider]]:
    """Return what makes each provider of a finalize on a GPU, by name, ours first.

    Args:
        folders: Peers' sources, by peer.
        top_ks: For which K to build modules.
    """
    makers: dict[str, Callable[[], Provider]] = {"sgl_moe_jit": lambda: build_ours(top_ks)}
    if "sglang" in folders:
        makers["sglang"] = lambda: sglang(folders["sglang"])
    if "flashinfer" in folders:
        makers["flashinfer+add"] = lambda: flashinfer_add(folders["flashinfer"])
    makers["torch"] = lambda: each(torch_eager)
    makers["torch.compile"] = lambda: torch_compiled
    return makers
