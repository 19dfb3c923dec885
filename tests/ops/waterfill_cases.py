# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Waterfill calls at random, their oracles, and the best that any choice of ranks could do."""

import random
from dataclasses import dataclass

import torch

from sgl_moe_jit.ops import reference_waterfill, waterfill_topk_with_shared_expert
from sgl_moe_jit.ops.waterfill import waterfill_on
from sgl_moe_jit.ops.waterfill_kernel import WaterfillCall
from tests.ops.ep_topk_cases import make_ids, make_weights

ORACLES = {
    "exact": reference_waterfill.exact,
    "exact_restricted": reference_waterfill.restricted,
    "sampled": reference_waterfill.sampled,
}
# One rank; powers of two and not; a warp's 32 and more; DeepSeek's 72 and 320; the limit.
WORLD_SIZES = (1, 2, 3, 6, 8, 12, 16, 32, 33, 64, 72, 320, 512)


@dataclass
class WaterfillCase:
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    world_size: int
    source: int
    start: int
    valid: int | None
    counts: list[int] | None
    tokens: list[int] | None

    def numbers(self):
        return self.num_experts, self.world_size, self.source

    def scalars(self, device):
        """Return what may change between replays: rows, counts, tokens."""
        valid = None if self.valid is None else torch.tensor(self.valid, device=device)
        if self.counts is None:
            return valid, None, None
        return valid, *(torch.tensor(x, device=device) for x in (self.counts, self.tokens))

    def run(self, mode, device="cpu", path=None):
        valid, counts, tokens = self.scalars(device)
        tensors = self.ids.to(device), self.weights.to(device)
        if path is not None:
            call = (*tensors, *self.numbers(), 0.4, mode, counts, tokens, self.start, valid)
            return waterfill_on(path, WaterfillCall(*call))
        return waterfill_topk_with_shared_expert(
            *tensors,
            *self.numbers(),
            0.4,
            mode=mode,
            global_counts=counts,
            tokens_per_rank=tokens,
            remainder_start=self.start,
            min_tokens=0,
            num_token_non_padded=valid,
        )

    def oracle_ranks(self, mode):
        start = {"remainder_start": self.start} if mode == "exact" else {}
        counts = {"global_counts": self.counts, "tokens_per_rank": self.tokens}
        return ORACLES[mode](self.ids, *self.numbers(), num_valid=self.valid, **counts, **start)

    def oracle(self, mode):
        ranks = self.oracle_ranks(mode)
        shape = (self.num_experts, self.world_size)
        call = (self.ids, self.weights, *shape, ranks, 0.4, 1, self.valid)
        return reference_waterfill.expand(*call)


def make(seed, world_size, num_tokens=None):
    """Return a call of random size, with padding, absent experts and global counts at times."""
    rng = random.Random(seed)
    local = rng.choice([1, 2, 8])
    num_experts = world_size * local
    top_k = rng.randint(1, min(num_experts, 9))
    if num_tokens is None:
        num_tokens = rng.choice([1, 5, 64, 100, 257, 600])
    ids = make_ids(
        *(num_tokens, num_experts, top_k),
        absent=rng.choice([0, 0.3, 1.0]),
        dtype=rng.choice([torch.int32, torch.int64]),
        seed=seed,
        skew=rng.choice([0, 5]),
    )
    source = rng.randrange(world_size)
    valid = rng.choice([None, num_tokens // 2, 0])
    counts = tokens = None
    if rng.random() < 0.4:
        most = rng.choice([300, 70_000])  # products beyond 32 bits
        counts, own = reference_waterfill.count(ids, num_experts, world_size, valid)
        tokens = [rng.randint(0, 300) for _ in range(world_size)]
        tokens[source - 1] = most
        tokens[source] = own
        counts = [x + rng.randint(0, 500) for x in counts]
    return WaterfillCase(
        *(ids, make_weights(ids), num_experts, world_size, source),
        *(rng.randrange(world_size), valid, counts, tokens),
    )


def chosen_ranks(case, out_ids):
    """Return each row's rank as its shared column says, -1 without one; check that it is a slot."""
    local = case.num_experts // case.world_size
    shared = out_ids[:, -1].tolist()
    assert all(x == -1 or x % (local + 1) == local for x in shared), shared
    return [-1 if x < 0 else x // (local + 1) for x in shared]


def least_maximum(load, choices):
    """Return the lowest possible highest load, each token on one of its choices, by augmenting."""
    on = [[] for _ in load]
    cap = max(*load, -(-(sum(load) + len(choices)) // len(load)))
    for token in range(len(choices)):
        while not _place(token, choices, on, [cap - x for x in load]):
            cap += 1
    return cap


def _place(token, choices, on, room):
    """Find room for a token, moving others along one path; breadth first."""
    came, queue = {}, []
    for rank in choices[token]:
        came[rank] = (token, None)
        queue.append(rank)
    for rank in queue:
        if len(on[rank]) < room[rank]:
            while rank is not None:
                mover, source = came[rank]
                on[rank].append(mover)
                if source is not None:
                    on[source].remove(mover)
                rank = source
            return True
        for other in on[rank]:
            for target in choices[other]:
                if target not in came:
                    came[target] = (other, rank)
                    queue.append(target)
    return False
