# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Other implementations of the same finalize, to be timed beside ours in one process.

A peer's sources are never part of this project: ``--peer sglang=<folder>`` names a folder that
holds the two files of its kernel (``moe_finalize_fuse_shared.cu`` and ``tvm_ffi_utils.h``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_moe_jit.bench.cases import FinalizeInputs
from sgl_moe_jit.jit import cache_once, load_jit
from sgl_moe_jit.ops import moe_finalize_fuse_shared

# Makes a call that writes ``inputs.out``.
Provider = Callable[[FinalizeInputs, int], Callable[[], object]]


def ours(inputs: FinalizeInputs, top_k: int) -> Callable[[], object]:
    """This library's op, writing into ``out``."""
    return lambda: moe_finalize_fuse_shared(
        inputs.gemm2_out,
        inputs.expanded_idx_to_permuted_idx,
        inputs.expert_weights,
        inputs.shared_output,
        top_k,
        out=inputs.out,
    )


def torch_eager(inputs: FinalizeInputs, top_k: int) -> Callable[[], object]:
    """What is written without a kernel: gather, scale, sum, add."""
    width = inputs.out.shape[1]
    rows = inputs.expanded_idx_to_permuted_idx.long()

    def call() -> object:
        terms = inputs.gemm2_out[rows, :width].float() * inputs.expert_weights[..., None]
        return inputs.out.copy_(terms.sum(1) + inputs.shared_output)

    return call


def torch_bmm(inputs: FinalizeInputs, top_k: int) -> Callable[[], object]:
    """The same as one batched matrix product, in the activations' dtype."""
    width = inputs.out.shape[1]
    rows = inputs.expanded_idx_to_permuted_idx.long()

    def call() -> object:
        gathered = inputs.gemm2_out[rows, :width]
        weights = inputs.expert_weights.to(gathered.dtype)[:, None]
        return inputs.out.copy_(torch.bmm(weights, gathered)[:, 0] + inputs.shared_output)

    return call


@cache_once
def _sglang_module(folder: str) -> Any:
    return load_jit(
        "peer_sglang",
        cuda_files=[Path(folder).resolve() / "moe_finalize_fuse_shared.cu"],
        extra_include_paths=[Path(folder).resolve()],
        extra_dependencies=["cutlass"],
    )


def sglang(folder: str) -> Provider:
    """Return sglang's kernel, launched with PDL as its engine does, built from its two files."""
    kernel = _sglang_module(folder).moe_finalize_fuse_shared

    def provider(inputs: FinalizeInputs, top_k: int) -> Callable[[], object]:
        rows = inputs.expanded_idx_to_permuted_idx.view(-1)
        return lambda: kernel(
            inputs.out,
            inputs.gemm2_out,
            rows,
            inputs.expert_weights,
            inputs.shared_output,
            top_k,
            True,
        )

    return provider


def parse_peer(text: str) -> tuple[str, Provider]:
    """Read ``sglang=<folder>``.

    Raises:
        ValueError: another form.
    """
    name, _, folder = text.partition("=")
    if name != "sglang" or not folder:
        raise ValueError(f"--peer: expected sglang=<folder>, got {text!r}")
    return name, sglang(folder)
