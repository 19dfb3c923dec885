# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a balancer gets: weights of the routed slots, the table of replicas, and counts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.ep import (
    EpLayout,
    ExpertCounts,
    drop_shared_counts,
    get_moe_weights,
    logical_to_physical_table,
    mark_global_experts,
    to_physical,
)
from sgl_moe_jit.errors import UnsupportedError

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "ep_layout.json").read_text())
field_report = pytest.mark.field_report
int_dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])


class Experts(torch.nn.Module):
    """B slots of an engine's layer, the last S of them shared, quantized."""

    def __init__(self, num_slots=5, num_shared=1):
        super().__init__()
        self.num_local_experts, self.num_fused_shared_experts = num_slots, num_shared

        def parameter(*shape, dtype=torch.float32):
            values = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)
            return torch.nn.Parameter(values, requires_grad=False)

        self.w13_weight = parameter(num_slots, 2, dtype=torch.float8_e4m3fn)
        self.w13_weight_scale_inv = parameter(num_slots, 1, 2)
        self.w2_input_scale = parameter(num_slots)  # one number a slot, and it moves
        self.w2_bias = parameter(num_slots, 3)  # inside the experts: moves with them
        self.input_scale_of_all = mark_global_experts(parameter(num_slots, 2))
        self.e_score_correction_bias = parameter(num_slots)  # the router's
        self.other = parameter(num_slots + 1, 2)
        self.factor = parameter()
        self.norm = torch.nn.LayerNorm(num_slots)  # a part of its own, by chance of that length


MOVING = ["w13_weight", "w13_weight_scale_inv", "w2_input_scale", "w2_bias"]


@field_report("E3")
def test_weight_views_are_the_routed_prefix_of_what_is_indexed_by_slot():
    case = VECTORS["eplb_weight_view"]
    experts = Experts(case["local_slots"], case["shared"])
    views = get_moe_weights(experts, EpLayout(7, 1, 2, 1))
    assert list(views[0].shape) == case["expected_view_shape"]
    assert {v.shape[0] for v in views} == {4}
    assert [v.data_ptr() for v in views] == [getattr(experts, n).data_ptr() for n in MOVING]
    shared = {name: getattr(experts, name)[4].clone() for name in MOVING}
    for view in views:
        view[3].zero_()
    for name in MOVING:
        parameter = getattr(experts, name)
        assert not parameter[3].float().any()  # written through
        assert torch.equal(parameter[4].float(), shared[name].float())


def test_every_slot_is_routed_without_shared_ones():
    experts = Experts(5, 0)
    assert {v.shape[0] for v in get_moe_weights(experts)} == {5}
    del experts.num_fused_shared_experts
    assert {v.shape[0] for v in get_moe_weights(experts)} == {5}


def test_weights_that_do_not_fit_are_refused():
    for layout in (EpLayout(5), EpLayout(4, 0, 1, 2), EpLayout(3, 0, 1, 2)):
        with pytest.raises(ValueError, match=r"slots as the layout has, got 4 and 1"):
            get_moe_weights(Experts(), layout)
    with pytest.raises(ValueError, match="at least one routed slot beside the shared ones"):
        get_moe_weights(Experts(5, 5))
    experts = Experts()
    experts.num_local_experts = 9
    with pytest.raises(ValueError, match="expected parameters with 9 entries, one a slot"):
        get_moe_weights(experts)
    experts = Experts()
    torch.nn.utils.parametrize.register_parametrization(experts, "w2_bias", torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="expected plain parameters, got parametrized ones"):
        get_moe_weights(experts)


def test_table_of_replicas():
    assert logical_to_physical_table(EpLayout(4)).tolist() == [[0], [1], [2], [3]]
    table = logical_to_physical_table(EpLayout(4, 2, 2, 1), [3, 0, 3, 1, 2, 3])
    assert table.tolist() == [[1, -1, -1], [3, -1, -1], [4, -1, -1], [0, 2, 5]]
    with pytest.raises(ValueError, match="physical_to_logical: expected 6 entries"):
        logical_to_physical_table(EpLayout(4, 2, 2, 1), [0, 1, 2, 3])


@field_report("E1")
@int_dtypes
def test_a_shared_column_never_indexes_the_table(dtype):
    """Its id is the table's length: one past the last line."""
    layout = EpLayout(256, 16, 16, 1)
    generator = torch.Generator().manual_seed(3)
    mapping = torch.randperm(256, generator=generator).tolist()
    table = logical_to_physical_table(layout, mapping + mapping[:16])
    routed = torch.rand(64, 256, generator=generator).argsort(1)[:, :8]
    ids = torch.cat([routed, torch.full((64, 1), 256)], 1).to(dtype)
    got = to_physical(ids, table, num_shared_columns=1)
    assert got.dtype == dtype and got.shape == (64, 9)
    assert got[:, 8].tolist() == [256] * 64
    held = mapping + mapping[:16]
    assert [[held[p] for p in row] for row in got[:, :8].tolist()] == routed.tolist()
    with pytest.raises(ValueError, match="below 256, the table's length, got 256; name columns"):
        to_physical(ids, table)


@int_dtypes
def test_the_mask_comes_after_the_table(dtype):
    """A table read at -1 gives its last line, which is an expert."""
    table = torch.tensor([5, 4, 3, 2, 1, 0])
    ids = torch.tensor([[0, -1, 9], [-1, -1, 9], [2, 3, 9], [5, 0, 9]], dtype=dtype)
    want = [[5, -1, 9], [-1, -1, 9], [3, 2, 9], [0, 5, 9]]
    assert to_physical(ids, table, num_shared_columns=1).tolist() == want
    for n in (0, 2, 4, 9):
        masked = [row if t < n else [-1] * 3 for t, row in enumerate(want)]
        for form in (n, torch.tensor(n), torch.tensor([n], dtype=torch.int32)):
            got = to_physical(ids, table, num_shared_columns=1, num_token_non_padded=form)
            assert got.dtype == dtype and got.tolist() == masked
    assert ids.tolist()[0] == [0, -1, 9]  # not written to
    assert to_physical(ids[:0], table).shape == (0, 3)


def test_replicas_take_turns_and_ranks_agree():
    table = logical_to_physical_table(EpLayout(4, 2, 2, 1), [3, 0, 3, 1, 2, 3])
    ids = torch.full((7, 1), 3)
    assert to_physical(ids, table).flatten().tolist() == [0, 2, 5, 0, 2, 5, 0]
    whole = to_physical(ids, table)
    parts = [to_physical(ids[:3], table), to_physical(ids[3:], table, first_token=3)]
    assert torch.equal(torch.cat(parts), whole)
    assert to_physical(ids, table, first_token=2).flatten().tolist()[:3] == [5, 0, 2]


@pytest.mark.parametrize(
    ("ids", "table", "options", "error", "message"),
    [
        (torch.zeros(2, 2), torch.zeros(4).long(), {}, TypeError, "int64, got torch.float32 and"),
        (torch.zeros(2, 2).long(), torch.zeros(4), {}, TypeError, "and torch.float32"),
        (torch.zeros(2).long(), torch.zeros(4).long(), {}, ValueError, "topk_ids: expected"),
        (
            torch.zeros(2, 2).long(),
            torch.zeros(4).long(),
            {"num_shared_columns": 2},
            ValueError,
            "with K >= 1, got",
        ),
        (torch.zeros(2, 2).long(), torch.zeros(0, 2).long(), {}, ValueError, "table: expected"),
        (
            torch.zeros(2, 2).long(),
            torch.tensor([[0], [-1]]),
            {},
            ValueError,
            "table: expected the replicas of each expert",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(ids, table, options, error, message):
    with pytest.raises(error, match=message):
        to_physical(ids, table, **options)
    with pytest.raises(ValueError, match="table: expected it on cpu like topk_ids, got meta"):
        to_physical(torch.zeros(2, 2).long(), torch.zeros(4, device="meta").long())


@field_report("E3")
def test_counts_lose_exactly_the_declared_tail():
    case = VECTORS["recorder"]
    counts, tail = torch.tensor(case["counts"]), case["trailing_shared_slots"]
    assert drop_shared_counts(counts, 2, tail).tolist() == case["expected"]
    for wrong, routed, shared in [
        (counts, 2, 1),
        (counts, 2, 0),
        (counts, 2, 3),
        (torch.ones(5), 2, 2),
        (torch.tensor(1), 2, 2),
        (counts, 5, -1),
        (counts, 0, 4),
    ]:
        with pytest.raises(ValueError, match=f"counts: expected .* {routed} routed slots"):
            drop_shared_counts(wrong, routed, shared)


@field_report("E3")
@pytest.mark.parametrize("sizes", [(256, 8, 8, 1), (128, 0, 4, 2), (6, 0, 1, 1)], ids=str)
def test_counts_equal_a_histogram_of_the_routed_choices(sizes):
    layout, draw = EpLayout(*sizes), random.Random(1)
    histogram = [0] * layout.num_physical
    recorders = [ExpertCounts(layout) for _ in range(3)]
    for num_tokens in (40, 0, 7):
        rows = []
        for _ in range(num_tokens):
            row = [draw.choice([-1, *range(layout.num_physical)]) for _ in range(4)]
            rows.append(row)
            for e in row:
                if e >= 0:
                    histogram[e] += 1
        routed = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
        recorders[0].add_routed(routed)
        shared = torch.full((num_tokens, 1), layout.shared_id(layout.ep_size - 1)).int()
        dispatched = torch.cat([layout.to_dispatch(routed), shared], 1)
        recorders[1].add_dispatched(dispatched)
        for rank in range(layout.ep_size):  # as each rank's dispatcher would report
            local = layout.local_id(dispatched, rank).flatten()
            slots = [int((local == slot).sum()) for slot in range(layout.num_local)]
            recorders[2].add_local(
                rank, torch.tensor(slots), num_trailing_shared_slots=layout.num_shared
            )
    for recorder in recorders:
        assert recorder.counts.shape == (layout.num_physical,)
        assert recorder.counts.tolist() == histogram
        recorder.reset()
        assert not recorder.counts.any()


def test_counts_that_do_not_fit_are_refused():
    recorder = ExpertCounts(EpLayout(8, 0, 4, 1))
    with pytest.raises(ValueError, match="counts: expected 2 entries, 2 routed slots and 0"):
        recorder.add_local(0, torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match=r"counts: expected integers, got torch.float32"):
        recorder.add_local(0, torch.ones(2))
    with pytest.raises(ValueError, match=r"counts: expected \[slots\], got \(1, 2\)"):
        recorder.add_local(0, torch.ones(1, 2).long())
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="rank: expected 0 <= rank < ep_size, 4"):
            recorder.add_local(rank, torch.ones(2).long())
    with pytest.raises(ValueError, match="ids: expected at most 7 here, got 8"):
        recorder.add_routed(torch.tensor([8]))
    with pytest.raises(TypeError, match="ids: expected int32 or int64"):
        recorder.add_routed(torch.ones(2))
    assert not recorder.counts.any()


@pytest.mark.gpu
def test_table_and_counts_in_a_captured_graph():
    layout = EpLayout(6, 2, 2, 1)
    table = logical_to_physical_table(layout).cuda()
    recorder = ExpertCounts(layout, "cuda")
    ids = torch.zeros(4, 3, dtype=torch.int64, device="cuda")
    valid = torch.zeros(1, dtype=torch.int32, device="cuda")

    def call():
        physical = to_physical(ids, table, num_shared_columns=1, num_token_non_padded=valid)
        recorder.add_routed(physical[:, :2])
        return physical

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    recorder.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    total = torch.zeros(8, dtype=torch.int64)
    for seed, n in enumerate((4, 2, 0, 3)):
        generator = torch.Generator().manual_seed(seed)
        given = torch.randint(-1, 6, (4, 3), generator=generator)
        ids.copy_(given)
        valid.fill_(n)
        graph.replay()
        want = to_physical(given, table.cpu(), num_shared_columns=1, num_token_non_padded=n)
        assert out.cpu().tolist() == want.tolist()
        for e in want[:, :2].flatten().tolist():
            if e >= 0:
                total[e] += 1
    assert recorder.counts.cpu().tolist() == total.tolist()
