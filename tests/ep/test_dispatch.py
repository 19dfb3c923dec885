# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``TorchDispatcher`` over ranks that are threads: what travels, and what comes back."""

import pytest
import torch

from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ops import moe_finalize_fuse_shared
from tests.ep.dispatch_cases import MODE_NAMES, MODES, H, slot_row, there_and_back
from tests.ep.thread_ranks import all_ranks


def want_rows(batches, rank, slots):
    """Rows that a rank has to receive: (source, token, its local slots)."""
    found = []
    for source, (_, ids, _) in enumerate(batches):
        for token, row in enumerate(ids.tolist()):
            local = [d - rank * slots if d >= 0 and d // slots == rank else -1 for d in row]
            if any(d >= 0 for d in local):
                found.append((source, token, local))
    return found


SHAPES = [  # ranks, slots a rank, slots a token, tokens of each rank
    pytest.param(1, 3, 2, [4], id="one-rank"),
    pytest.param(2, 1, 2, [5, 3], id="one-slot-a-rank"),
    pytest.param(3, 4, 5, [7, 1, 9], id="several-slots-of-one-rank"),
    pytest.param(5, 2, 9, [2, 6, 4, 1, 3], id="more-than-a-power-of-two"),
    pytest.param(3, 2, 3, [0, 4, 5], id="none-on-the-first"),
    pytest.param(3, 2, 3, [4, 0, 5], id="none-in-the-middle"),
    pytest.param(3, 2, 3, [4, 5, 0], id="none-on-the-last"),
    pytest.param(3, 2, 3, [0, 6, 0], id="all-on-one"),
    pytest.param(3, 2, 3, [0, 0, 0], id="none-at-all"),
]


@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize(("ranks", "slots", "top_k", "tokens"), SHAPES)
def test_each_row_travels_once_to_each_rank(monkeypatch, ranks, slots, top_k, tokens, mode):
    done, world = all_ranks(
        monkeypatch,
        ranks,
        lambda group: there_and_back(group, tokens[group.rank()], slots, top_k, mode),
    )
    batches = [(x, ids, weights) for x, ids, weights, _, _ in done]
    fixed = mode.get("max_tokens_per_rank")
    for rank, (_, _, _, rows, _) in enumerate(done):
        x, topk = rows.hidden_states, rows.topk_output
        keep = (topk.topk_ids >= 0).any(1)
        if fixed:
            assert x.shape[0] == ranks * fixed
        else:
            assert keep.all(), "a row without an expert here was sent"
        got = list(zip(x[keep], topk.topk_ids[keep], topk.topk_weights[keep], strict=True))
        want = want_rows(batches, rank, slots)
        assert len(got) == len(want)
        for (row, local, weights), (source, token, slots_there) in zip(got, want, strict=True):
            assert torch.equal(row, batches[source][0][token])
            assert local.tolist() == slots_there
            if mode["sum_at"] == "experts":
                here = local >= 0
                assert torch.equal(weights[here], batches[source][2][token][here])
    # Of each rank: the counts, the rows, the ids; then the way back. Fixed: no counts.
    assert len(world.log) == ranks * (3 if fixed else 4)
    if mode["sum_at"] == "source":
        pairs = sum(int((ids >= 0).sum()) for _, ids, _ in batches)
        assert sum(sum(send) for _, send, _ in world.log[-ranks:]) == pairs


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES, ids=MODE_NAMES)
@pytest.mark.parametrize(("ranks", "slots", "top_k", "tokens"), SHAPES)
def test_the_combine_is_the_sum(monkeypatch, ranks, slots, top_k, tokens, mode, dtype, id_dtype):
    done, _ = all_ranks(
        monkeypatch,
        ranks,
        lambda group: there_and_back(
            group, tokens[group.rank()], slots, top_k, mode, dtype, id_dtype
        ),
    )
    for x, ids, weights, _, returned in done:
        assert returned.top_k == top_k and returned.routed_scaling_factor == 1.0
        assert returned.expanded_idx_to_permuted_idx.shape == ids.shape
        got = returned.finalize()
        assert got.dtype == dtype and got.shape == x.shape
        rows = torch.stack([slot_row(x.float(), d).to(dtype) for d in range(ranks * slots)])
        want, size = torch.zeros(2, *x.shape, dtype=torch.float64)
        for t, k in ((ids >= 0).nonzero()).tolist():
            term = weights[t, k].double() * rows[ids[t, k].long(), t].double()
            want[t] += term
            size[t] += term.abs()
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
        accumulation = (top_k + 2) * 2.0**-24
        # One rounding at the source; with the experts' sums one more of each rank's part before it.
        roundings = 1 if mode["sum_at"] == "source" else 2
        assert ((got.double() - want).abs() <= (roundings * unit + accumulation) * size).all()
        if mode["sum_at"] == "source":  # the bits of one rank that has all the rows
            index = ids.long() * x.shape[0] + torch.arange(x.shape[0])[:, None]
            index = index.masked_fill(ids < 0, -1).int()
            alone = moe_finalize_fuse_shared(rows.flatten(0, 1), index, weights, None, top_k)
            assert torch.equal(got, alone)


def test_the_fixed_size_gives_the_same_bits(monkeypatch):
    tokens = [7, 0, 9]
    by_mode = [
        all_ranks(
            monkeypatch, 3, lambda g, m=mode: there_and_back(g, tokens[g.rank()], 4, 5, m)[-1]
        )[0]
        for mode in MODES[1:]
    ]
    for split, fixed in zip(*by_mode, strict=True):
        assert torch.equal(split.finalize(), fixed.finalize())


def test_the_sum_of_ranks_is_in_the_order_of_first_slots(monkeypatch):
    # rank 1's slots come first: its row has to be added first, whatever order rows come back in
    def call(group):
        dispatcher = TorchDispatcher(group, 2, sum_at="experts")
        ids = torch.tensor([[2, 0, 3, -1]])
        rows = dispatcher.dispatch(torch.ones(1, H), ids, torch.ones(1, 4))
        return dispatcher.combine(rows.hidden_states, rows)

    (first, _), _ = all_ranks(monkeypatch, 2, call)
    assert first.expanded_idx_to_permuted_idx.tolist() == [[1, 0, -1, -1]]
    assert first.expert_weights is None
