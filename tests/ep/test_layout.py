# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The id spaces: every vector, bijections, and an oracle that writes the blocks out by hand."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.env import CHECK_INDICES
from sgl_moe_jit.ep import EpLayout

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "ep_layout.json").read_text())
field_report = pytest.mark.field_report
int_dtypes = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])

# (num_experts, num_redundant, ep_size, num_shared)
LAYOUTS = [
    (256, 0, 16, 1),
    (256, 8, 8, 1),
    (256, 16, 16, 1),
    (256, 32, 8, 1),  # redundant experts fill a whole rank's share
    (128, 0, 4, 2),
    (8, 0, 1, 1),
    (60, 0, 6, 1),  # ranks that are no power of two
    (60, 12, 72, 3),  # one routed slot a rank
    (384, 0, 12, 1),
    (1024, 0, 512, 1),  # the largest number of ranks
    (10, 0, 5, 0),  # no shared slots
    (3, 5, 2, 1),  # more replicas than experts
]


def blocks(num_experts, num_redundant, ep_size, num_shared) -> list[tuple[str, int, int]]:
    """Write the dispatch space out: for each slot its kind, its routed id or s, and its rank."""
    slots, routed = [], 0
    local = (num_experts + num_redundant) // ep_size
    for rank in range(ep_size):
        for _ in range(local):
            slots.append(("routed", routed, rank))
            routed += 1
        slots += [("shared", s, rank) for s in range(num_shared)]
    return slots


@int_dtypes
@pytest.mark.parametrize("case", VECTORS["layouts"], ids=lambda c: f"W{c['ranks']}")
def test_vectors(case, dtype):
    layout = EpLayout(case["experts"], 0, case["ranks"], case["shared"])
    assert layout.num_total == case["total"]
    routed = [int(e) for e in case["routed"]]
    want = list(case["routed"].values())
    assert [layout.to_dispatch(e) for e in routed] == want
    got = layout.to_dispatch(torch.tensor(routed, dtype=dtype))
    assert got.dtype == dtype and got.tolist() == want
    shared = [
        layout.shared_id(rank, s) for rank in range(case["ranks"]) for s in range(case["shared"])
    ]
    assert shared == case["shared_slots"]


@field_report("E2")
def test_redundant_experts_count_as_slots():
    # A layout that took the logical 256 for the physical 264 would have 32 routed slots a rank.
    layout = EpLayout(256, 8, 8, 1)
    assert (layout.num_physical, layout.num_local_routed, layout.num_local) == (264, 33, 34)
    assert layout.to_dispatch(torch.tensor([0, 33, 263])).tolist() == [0, 34, 270]
    assert (layout.shared_id(7), layout.num_total) == (271, 272)
    assert layout.to_routed(torch.tensor([0, 34, 270])).tolist() == [0, 33, 263]


@int_dtypes
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_slot_against_the_blocks_written_out(sizes, dtype):
    layout, slots = EpLayout(*sizes), blocks(*sizes)
    assert layout.num_total == len(slots)
    assert layout.num_local * layout.ep_size == len(slots)
    ids = torch.arange(len(slots), dtype=dtype)
    is_shared = [kind == "shared" for kind, _, _ in slots]
    routed = [-1 if kind == "shared" else number for kind, number, _ in slots]
    owner = [rank for _, _, rank in slots]
    local = [place % layout.num_local for place in range(len(slots))]
    assert layout.is_shared(ids).tolist() == is_shared
    for method, want in [("to_routed", routed), ("owner_rank", owner), ("local_id", local)]:
        got = getattr(layout, method)(ids)
        assert got.dtype == dtype and got.tolist() == want, method
        assert [getattr(layout, method)(i) for i in range(len(slots))] == want, method
    rank = layout.ep_size - 1
    want = [number if owned == rank else -1 for number, owned in zip(local, owner, strict=True)]
    assert layout.local_id(ids, rank).tolist() == want
    assert [layout.local_id(i, rank) for i in range(len(slots))] == want
    assert [layout.is_shared(i) for i in range(len(slots))] == is_shared
    for place, (kind, number, rank) in enumerate(slots):
        if kind == "shared":
            assert layout.shared_id(rank, number) == place


@field_report("E4")
def test_routed_and_shared_ids_fill_the_space_once():
    # A random sweep; a shift that forgets S > 1 lets two ids collide.
    draw = random.Random(7)
    for _ in range(100):
        ep_size, local = draw.randint(1, 512), draw.randint(1, 12)
        redundant = draw.randint(0, ep_size * local - 1)
        sizes = (ep_size * local - redundant, redundant, ep_size, draw.randint(1, 4))
        layout = EpLayout(*sizes)
        routed = torch.arange(layout.num_physical)
        dispatch = layout.to_dispatch(routed)
        assert torch.equal(layout.to_routed(dispatch), routed), sizes
        shared = [layout.shared_id(r, s) for r in range(ep_size) for s in range(sizes[3])]
        assert sorted([*dispatch.tolist(), *shared]) == list(range(layout.num_total)), sizes


@int_dtypes
@pytest.mark.parametrize("sizes", [(256, 8, 8, 1), (128, 0, 4, 2), (8, 0, 1, 1)], ids=str)
def test_no_expert_stays_as_it_is(sizes, dtype):
    layout = EpLayout(*sizes)
    ids = torch.tensor([[-1, 3], [-1, -1]], dtype=dtype)
    assert layout.to_dispatch(ids).tolist() == [[-1, 3], [-1, -1]]  # -1 + -1 // L would be -2
    for method in ("to_dispatch", "to_routed", "owner_rank", "local_id"):
        got = getattr(layout, method)(torch.full((4,), -1, dtype=dtype))
        assert got.tolist() == [-1] * 4, method
        assert getattr(layout, method)(-1) == -1, method
        assert getattr(layout, method)(torch.empty(0, 8, dtype=dtype)).shape == (0, 8), method
    assert layout.local_id(-1, 0) == -1
    assert layout.is_shared(-1) is False and not layout.is_shared(ids[1]).any()


def test_loader_map_vector():
    case = VECTORS["loader_map"]
    layout = EpLayout(case["experts"], 0, case["ranks"], case["shared"])
    got = layout.loader_map(case["rank"])
    assert {str(i): got[i] for i in map(int, case["map"])} == case["map"]
    assert got == (-1, -1, -1, -1, 0, 1, 2, 3, 4)


@field_report("E2")
def test_loader_finds_shared_experts_at_the_logical_boundary():
    layout = EpLayout(256, 8, 8, 1)
    for rank in range(8):
        got = layout.loader_map(rank)
        assert len(got) == 257 and got[256] == 33  # behind 33 routed slots, on every rank
    last = layout.loader_map(7)  # physical slots 231 to 263: experts 231 to 255, then 0 to 7 again
    assert [last[e] for e in (230, 231, 255, 0, 7, 8)] == [-1, 0, 24, 25, 32, -1]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_each_checkpoint_expert_lands_on_its_ranks(sizes):
    layout = EpLayout(*sizes)
    seen = [0] * (layout.num_experts + layout.num_shared)
    for rank in range(layout.ep_size):
        sources = layout.slot_sources(rank)
        assert len(sources) == layout.num_local
        for source in sources:
            seen[source] += 1
        if len({*sources}) == len(sources):
            local = layout.loader_map(rank)
            assert [local[source] for source in sources] == list(range(layout.num_local))
            assert sum(slot >= 0 for slot in local) == layout.num_local
    assert min(seen[: layout.num_experts]) >= 1
    assert sum(seen[: layout.num_experts]) == layout.num_physical
    assert seen[layout.num_experts :] == [layout.ep_size] * layout.num_shared


def test_a_table_of_replicas_decides_the_routed_slots():
    layout = EpLayout(4, 2, 2, 1)
    table = [3, 0, 3, 1, 2, 0]
    assert layout.slot_sources(0, table) == (3, 0, 3, 4)
    assert layout.slot_sources(1, torch.tensor(table)) == (1, 2, 0, 4)
    assert layout.loader_map(1, table) == (2, 0, 1, -1, 3)
    with pytest.raises(ValueError, match="expert 3 is in slots 0 and 2 of rank 0"):
        layout.loader_map(0, table)


@pytest.mark.parametrize("table", [[0, 1, 2, 3], [0, 1, 2, 3, 0, 4], [0, 1, 2, 2, 1, 0], []])
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ValueError, match="physical_to_logical: expected 6 entries that name each"):
        EpLayout(4, 2, 2, 1).slot_sources(0, table)


@pytest.mark.parametrize("table", ["abc", 5, [0, 1.5]])
def test_a_table_of_something_else_is_refused_by_name(table):
    with pytest.raises(TypeError, match="physical_to_logical: expected a sequence of ints, got"):
        EpLayout(4, 2, 2, 1).loader_map(0, table)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0,), "num_experts: expected at least 1, got 0"),
        ((8, -1), "num_redundant: expected at least 0, got -1"),
        ((8, 0, 0), "ep_size: expected at least 1, got 0"),
        ((1024, 0, 1024), "ep_size: expected at most 512, got 1024"),
        ((8, 0, 2, -1), "num_shared: expected at least 0, got -1"),
        ((60, 0, 8), "expected a divisor of the 60 .*got 8; 4 more redundant experts make it one"),
        ((256, 1, 8), r"257 routed experts \(256 \+ 1 redundant\), got 8; 7 more"),
    ],
)
def test_what_is_no_layout_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        EpLayout(*sizes)


@pytest.mark.parametrize("value", [True, 8.0, "8", None])
def test_sizes_are_integers(value):
    for field in dataclasses.fields(EpLayout):
        with pytest.raises(TypeError, match=f"{field.name}: expected an integer"):
            EpLayout(**{"num_experts": 8, field.name: value})


def test_ids_out_of_range_are_refused():
    layout = EpLayout(8, 0, 4, 1)
    for make in (int, torch.tensor):
        assert layout.to_dispatch(make(7)) == 10
        with pytest.raises(ValueError, match="ids: expected at most 7 here, got 8"):
            layout.to_dispatch(make(8))
        for method in ("to_routed", "owner_rank", "local_id", "is_shared"):
            with pytest.raises(ValueError, match="ids: expected at most 11 here, got 12"):
                getattr(layout, method)(make(12))
    for rank in (-1, 4):
        for call in (layout.shared_id, layout.loader_map, lambda r: layout.local_id(0, r)):
            with pytest.raises(ValueError, match=f"rank: expected 0 <= rank.*4, got {rank}"):
                call(rank)
    with pytest.raises(ValueError, match="s: expected 0 <= s < num_shared, 1, got 1"):
        layout.shared_id(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="ids: expected int32 or int64"):
        EpLayout(8).to_dispatch(torch.ones(2).to(dtype))
    with pytest.raises(TypeError, match="ids: expected an integer or a tensor, got bool"):
        EpLayout(8).to_dispatch(True)


def test_traces_in_one_graph():
    layout = EpLayout(128, 0, 4, 2)
    ids = torch.tensor([31, 32, -1, 127])
    compiled = torch.compile(lambda x: layout.to_dispatch(x), fullgraph=True, backend="eager")
    assert compiled(ids).tolist() == [31, 34, -1, 133]


@pytest.mark.gpu
def test_large_ids_on_a_gpu_are_refused_on_request(monkeypatch):
    layout = EpLayout(8, 0, 4, 1)
    ids = torch.tensor([0, 8], device="cuda")
    assert layout.to_dispatch(ids).tolist() == [0, 12]  # the formula, of what is there
    monkeypatch.setenv(CHECK_INDICES.name, "1")
    with pytest.raises(ValueError, match="ids: expected at most 7 here, got 8"):
        layout.to_dispatch(ids)
