# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens, ids and stand-ins for experts of the dispatcher's tests."""

import torch

from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput

H = 8
MODES = [
    {"sum_at": "source"},
    {"sum_at": "experts"},
    {"sum_at": "experts", "max_tokens_per_rank": 9},
]
MODE_NAMES = ["source", "experts", "fixed"]


def batch(rank, num_tokens, ranks, slots, top_k, dtype=torch.float32, id_dtype=torch.int32):
    """One rank's tokens: distinct slots of the dispatch space, some absent; float32 weights."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(num_tokens, H, generator=generator).to(dtype)
    scores = torch.rand(num_tokens, max(ranks * slots, top_k), generator=generator)
    ids = scores.argsort(1)[:, :top_k].to(id_dtype)
    ids[ids >= ranks * slots] = -1
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    weights = torch.rand(ids.shape, generator=generator)
    return x, ids, weights


def slot_row(x, slot):
    """What the experts of these tests make of a row: differs from slot to slot."""
    return x * (slot + 1.0) + slot


def fake_experts(rows, first_slot, deferred):
    """Rows of each (row, local slot) pair in a shuffled order, or their weighted sum."""
    x, ids = rows.hidden_states, rows.topk_output.topk_ids
    count, width = ids.shape
    order = torch.randperm(count * width)
    gemm2 = torch.full((count * width + 1, x.shape[1] + 3), float("nan"), dtype=x.dtype)
    index = torch.full((count * width,), -1, dtype=torch.int32)
    for flat in range(count * width):
        local = int(ids.reshape(-1)[flat])
        if local >= 0:
            index[flat] = order[flat]
            row = slot_row(x[flat // width].float(), first_slot + local)
            gemm2[order[flat], : x.shape[1]] = row.to(x.dtype)
    output = DeferredFinalizeOutput(
        gemm2, rows.topk_output.topk_weights, index.view(count, width), width, 1.0, x.shape[1]
    )
    return output if deferred else output.finalize()


def there_and_back(group, tokens, slots, top_k, mode, dtype=torch.float32, id_dtype=torch.int32):
    x, ids, weights = batch(group.rank(), tokens, group.size(), slots, top_k, dtype, id_dtype)
    before = x.clone(), ids.clone(), weights.clone()
    dispatcher = TorchDispatcher(group, slots, **mode)
    rows = dispatcher.dispatch(x, ids, weights)
    output = fake_experts(rows, group.rank() * slots, dispatcher.takes_deferred)
    returned = dispatcher.combine(output, rows)
    for now, then in zip((x, ids, weights), before, strict=True):
        assert torch.equal(now, then), "an input was changed"
    return x, ids, weights, rows, returned
