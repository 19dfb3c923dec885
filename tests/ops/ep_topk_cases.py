# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of the ops on top-k ids under expert parallelism, and comparison of what they return."""

import json
from pathlib import Path

import torch

VECTORS = Path(__file__).parents[1] / "vectors"


def vectors(name):
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def make_ids(num_tokens, num_experts, top_k, *, absent=0.0, dtype=torch.int32, seed=0, skew=0.0):
    """Return K distinct experts a token; ``skew`` makes low ids more frequent."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores = scores ** (1 + skew * torch.arange(num_experts) / num_experts)
    ids = scores.topk(top_k).indices
    ids[torch.rand(ids.shape, generator=generator) < absent] = -1
    if num_tokens:  # whole rows absent too, and another negative id
        gone = torch.rand(num_tokens, generator=generator) < absent / 2
        ids[gone] = -7 if absent else -1
    return ids.to(dtype)


def make_weights(ids, dtype=torch.float32):
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) + 0.1
    weights[ids < 0] = float("nan")  # whoever multiplies by 0 shows it
    return weights.to(dtype)


def assert_same(got, want):
    for name, a, b in zip(("ids", "weights"), got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, (name, a.dtype, a.shape, b.shape)
        wrong = (a.cpu() != b.cpu()).nonzero()
        assert wrong.numel() == 0, (
            f"{name}: {len(wrong)} differ, first at {wrong[0].tolist()}: "
            f"got {a[tuple(wrong[0])].item()}, expected {b[tuple(wrong[0])].item()}"
        )
