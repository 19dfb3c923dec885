# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routed ids expanded for dispatch, and counted, on a CPU: values, padding, errors, tracing."""

import pytest
import torch

from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
    reference_waterfill,
)
from tests.ops.ep_topk_cases import assert_same, make_ids, make_weights, vectors

field_report = pytest.mark.field_report
expand = expand_topk_with_shared_expert
EXPAND_OP = torch.ops.sgl_moe_jit.expand_topk_with_shared_expert.default
COUNT_OP = torch.ops.sgl_moe_jit.count_tokens_per_rank.default


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_vector(dtype):
    case = vectors("ep_layout")["expand_topk"]
    ids = torch.tensor(case["topk_ids"], dtype=dtype)
    got, weights = expand(
        ids,
        torch.tensor(case["topk_weights"]),
        case["experts"],
        case["ranks"],
        case["source_rank"],
        case["shared_weight"],
    )
    assert got.dtype == dtype and weights.dtype == torch.float32
    assert got.tolist() == case["expected_ids"]
    assert torch.equal(weights, torch.tensor(case["expected_weights"]))


# 256 experts on 16 ranks; redundant experts, so that L is of the physical count; S = 2 (a shift by
# one slot a rank would collide); one rank.
@field_report("E2")
@field_report("E4")
@pytest.mark.parametrize("layout", vectors("ep_layout")["layouts"], ids=lambda x: str(x["experts"]))
def test_layout_vectors(layout):
    experts, ranks, shared = layout["experts"], layout["ranks"], layout["shared"]
    ids = torch.arange(experts)[None]
    sent = set()
    for rank in range(ranks):
        out, _ = expand(ids, torch.ones(ids.shape), experts, ranks, rank, num_shared=shared)
        for expert, slot in layout["routed"].items():
            assert out[0, int(expert)] == slot
        slots = layout["shared_slots"][rank * shared : (rank + 1) * shared]
        assert out[0, experts:].tolist() == slots
        sent |= set(out[0].tolist())
    assert sent == set(range(layout["total"]))  # each slot once


# A multiplication stands for the division by L where its quotient is right for every id. One expert
# a rank; powers of two and not; a rank as large as the factor is right for; one too large for it.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("experts", "ranks"),
    [(512, 512), (256, 32), (384, 72 // 3), (999, 37), (65536, 1), (131072, 2), (300_000, 2)],
)
def test_every_expert_is_sent_to_its_owner(experts, ranks, device):
    ids = torch.arange(experts, device=device).unsqueeze(1)
    weights = torch.ones(experts, 1, device=device)
    out, _ = expand(ids, weights, experts, ranks, ranks - 1)
    assert torch.equal(out[:, 0].cpu(), ids[:, 0].cpu() + ids[:, 0].cpu() // (experts // ranks))
    counts, tokens = count_tokens_per_rank(ids, experts, ranks, 0)
    assert counts.tolist() == [experts // ranks] * ranks
    assert tokens.tolist() == [experts] + [0] * (ranks - 1)


# Nothing; one; some; many ranks. W no power of two, one expert a rank, as many as the limit allows.
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
@pytest.mark.parametrize(
    ("experts", "ranks", "top_k", "shared"),
    [(8, 1, 2, 1), (72, 72, 6, 1), (264, 8, 8, 2), (1024, 512, 8, 3), (12, 3, 1, 1)],
)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_reference(num_tokens, experts, ranks, top_k, shared, id_dtype, dtype):
    ids = make_ids(num_tokens, experts, top_k, absent=0.3, dtype=id_dtype)
    weights = make_weights(ids, dtype)
    before = ids.clone(), weights.clone()
    for valid in (None, 0, 5, num_tokens + 1):
        for source in (0, ranks - 1):
            call = (experts, ranks, source, 0.4, shared, valid)
            scalar = None if valid is None else torch.tensor(valid, dtype=id_dtype)
            got = expand(
                *(ids, weights, experts, ranks, source, 0.4),
                num_shared=shared,
                num_token_non_padded=scalar,
            )
            assert_same(got, reference_waterfill.expand(ids, weights, *call))
            counts = count_tokens_per_rank(ids, experts, ranks, source, num_token_non_padded=scalar)
            pairs, rows = reference_waterfill.count(ids, experts, ranks, valid)
            assert counts[0].tolist() == pairs
            assert counts[1].tolist() == [rows * (r == source) for r in range(ranks)]
    assert torch.equal(ids, before[0]) and torch.equal(weights.isnan(), before[1].isnan())


@field_report("E1")
def test_a_table_of_the_routed_experts_never_sees_a_shared_id():
    """Replicas are looked up before the shared column is there; -1 must not read the last entry."""
    table = torch.tensor([3, 2, 1, 0])
    logical = torch.tensor([[0, -1], [2, 3]])
    physical = torch.where(logical < 0, logical, table[logical.clamp(min=0)])
    ids, _ = expand(physical, torch.ones(2, 2), 4, 2, 1)
    assert ids.tolist() == [[4, -1, 5], [1, 0, 5]]


def test_every_item_is_rewritten_after_a_padded_batch():
    ids, weights = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    for valid in (0, 4, 2):
        out, out_weights = expand(ids, weights, 4, 2, 0, num_token_non_padded=torch.tensor([valid]))
        assert out.tolist() == [[0, 0, 2]] * valid + [[-1] * 3] * (4 - valid)
        assert out_weights.tolist() == [[1.0] * 3] * valid + [[0.0] * 3] * (4 - valid)


def test_no_slots_a_token_means_no_live_row():
    ids, weights = expand(torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0), 4, 2, 0)
    assert ids.tolist() == [[-1]] * 3 and weights.tolist() == [[0.0]] * 3


def test_strided_inputs():
    ids, weights = make_ids(9, 16, 5), torch.rand(9, 5)
    want = expand(ids[:, :3].clone(), weights[:, 1:4].clone(), 16, 4, 2)
    assert_same(expand(ids[:, :3], weights[:, 1:4], 16, 4, 2), want)
    assert_same(expand(ids.t().contiguous().t()[:, :3], weights[:, 1:4], 16, 4, 2), want)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ids": [[0]]}, TypeError, "topk_ids: expected a Tensor, got list"),
        ({"ids": torch.zeros(3, 2)}, TypeError, "topk_ids: expected int32 or int64, got float32"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "topk_ids: expected .num_tokens"),
        ({"ids": torch.full((3, 2), 8)}, ValueError, "topk_ids: expected ids below 8 .* in row 0"),
        ({"weights": torch.zeros(3, 3)}, ValueError, "topk_weights: expected the shape of topk_id"),
        ({"weights": torch.zeros(3, 2).double()}, TypeError, "topk_weights: expected float32, bf"),
        ({"weights": None}, TypeError, "topk_weights: expected a Tensor, got None"),
        ({"experts": 9}, ValueError, "num_routed_experts: expected a multiple of world_size, 4"),
        ({"experts": 0}, ValueError, "num_routed_experts: expected a multiple"),
        ({"experts": 2**31}, ValueError, "num_routed_experts: .* below 2.31"),
        ({"ranks": 0}, ValueError, "world_size: expected 1 to 512, got 0"),
        ({"ranks": 513}, ValueError, "world_size: expected 1 to 512, got 513"),
        ({"ranks": 4.0}, TypeError, "world_size: expected an int, got float"),
        ({"source": 4}, ValueError, "source_rank: expected 0 to 3, got 4"),
        ({"source": -1}, ValueError, "source_rank: expected 0 to 3, got -1"),
        ({"shared": 0}, ValueError, "num_shared: expected at least 1, got 0"),
        ({"valid": 2}, TypeError, "num_token_non_padded: expected a Tensor or None, got int"),
        ({"valid": torch.ones(2).int()}, ValueError, "num_token_non_padded: expected one number"),
        ({"valid": torch.ones(1)}, TypeError, "num_token_non_padded: expected int32 or int64"),
    ],
)
def test_errors(change, error, match):
    call = {"ids": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.zeros(3, 2), "experts": 8}
    call = {**call, "ranks": 4, "source": 0, "shared": 1, "valid": None, **change}
    ints = (call["experts"], call["ranks"], call["source"])
    with pytest.raises(error, match=match):
        expand(
            call["ids"],
            call["weights"],
            *ints,
            num_shared=call["shared"],
            num_token_non_padded=call["valid"],
        )
    if not change.keys() & {"weights", "shared"}:
        with pytest.raises(error, match=match):
            count_tokens_per_rank(call["ids"], *ints, num_token_non_padded=call["valid"])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_of_a_wrong_kind_are_named_with_and_without_the_dispatcher(requires_grad):
    ids, weights = torch.zeros(2, 2).int(), torch.ones(2, 2, requires_grad=requires_grad)
    for name in ("num_routed_experts", "world_size", "source_rank", "num_shared"):
        call = {"num_routed_experts": 8, "world_size": 4, "source_rank": 0, name: 2**70}
        with pytest.raises(ValueError, match=f"{name}: expected"):
            expand(ids, weights, **call)
    for wrong in (torch.tensor(0.4), "1", None):
        with pytest.raises(TypeError, match="shared_weight: expected a float, got"):
            expand(ids, weights, 8, 4, 0, wrong)
    assert expand(ids, weights, 8, 4, 0, 2)[1][0, 2] == 2


def test_ids_out_of_range_in_padding_are_nobody_s():
    ids = torch.tensor([[1, 3], [2**31 - 1, 8]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"got 2147483647 in row 1"):
        expand(ids, torch.ones(2, 2), 8, 4, 0)
    out, _ = expand(ids, torch.ones(2, 2), 8, 4, 0, num_token_non_padded=torch.tensor(1))
    assert out.tolist() == [[1, 4, 2], [-1, -1, -1]]


def test_too_many_slots_are_refused_and_not_wrapped():
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)
    with pytest.raises(ValueError, match=r"num_tokens \* \(top_k \+ num_shared\) below 2\^31"):
        expand(ids, torch.zeros(1, 1).expand(2**28, 8), 8, 4, 0)


def test_more_than_one_thread_gives_the_same():
    ids = make_ids(9000, 64, 8, absent=0.1)
    weights = make_weights(ids)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = expand(ids, weights, 64, 8, 3)
        torch.set_num_threads(4)
        assert_same(expand(ids, weights, 64, 8, 3), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_shared", [1, 2])
def test_gradient_of_the_weights(num_shared):
    ids = torch.tensor([[0, -1], [3, 1], [-1, -1], [2, 2]])
    weights = torch.rand(4, 2, dtype=torch.float32, requires_grad=True)
    valid = torch.tensor(3)
    out_ids, out = expand(ids, weights, 4, 2, 0, num_shared=num_shared, num_token_non_padded=valid)
    assert not out_ids.requires_grad
    (grad,) = torch.autograd.grad(out, weights, torch.arange(out.numel()).view_as(out).float())
    width = 2 + num_shared
    want = [[0.0, 0.0], [float(width), width + 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert grad.tolist() == want


# What opcheck runs of a graph with gradients adds floats to its first output, here integers.
GRADIENT_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_opcheck():
    ids, weights = make_ids(5, 8, 2, absent=0.3), torch.rand(5, 2)
    torch.library.opcheck(EXPAND_OP, (ids, weights, 8, 4, 1, 0.4, 2, torch.tensor(4)))
    torch.library.opcheck(COUNT_OP, (ids, 8, 4, 1, torch.tensor(4)))
    weights.requires_grad_()
    torch.library.opcheck(EXPAND_OP, (ids, weights, 8, 4, 1), test_utils=GRADIENT_CHECKS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()

    def call(ids, weights, valid):
        return (
            *expand(ids, weights * 2, 8, 4, 1, 0.4, num_token_non_padded=valid),
            count_tokens_per_rank(ids, 8, 4, 1, num_token_non_padded=valid),
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager")
    for num_tokens in (3, 5, 0):
        ids, valid = make_ids(num_tokens, 8, 2, absent=0.2), torch.tensor(2)
        weights = torch.rand(num_tokens, 2)
        got, want = compiled(ids, weights, valid), call(ids, weights, valid)
        assert_same(got[:2], want[:2])
        assert torch.equal(got[2], want[2])
