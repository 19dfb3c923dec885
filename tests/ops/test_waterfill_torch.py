# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The waterfill on a CPU as a torch op: errors, gradient, opcheck, torch.compile."""

import pytest
import torch

from sgl_moe_jit.ops import expand_topk_with_shared_expert, waterfill_topk_with_shared_expert
from sgl_moe_jit.ops.waterfill_kernel import MODES
from tests.ops.ep_topk_cases import assert_same, make_ids
from tests.ops.test_expand_topk import GRADIENT_CHECKS

waterfill = waterfill_topk_with_shared_expert
OP = torch.ops.sgl_moe_jit.waterfill_topk_with_shared_expert.default
FOUR = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"topk_ids": torch.zeros(3, 2)}, TypeError, "topk_ids: expected int32 or int64"),
        ({"topk_ids": torch.full((3, 2), 8)}, ValueError, "topk_ids: expected ids below 8"),
        ({"topk_weights": torch.zeros(2, 2)}, ValueError, "topk_weights: expected the shape"),
        ({"num_routed_experts": 6}, ValueError, "num_routed_experts: expected a multiple of wor"),
        ({"source_rank": 4}, ValueError, "source_rank: expected 0 to 3, got 4"),
        ({"mode": "best"}, ValueError, "mode: expected one of exact, exact_restricted, sampled"),
        ({"remainder_start": 4}, ValueError, "remainder_start: expected 0 to 3, got 4"),
        ({"remainder_start": -1}, ValueError, "remainder_start: expected 0 to 3, got -1"),
        ({"remainder_start": None}, TypeError, "remainder_start: expected an int, got NoneType"),
        ({"remainder_start": 2**70}, ValueError, "remainder_start: expected"),
        ({"shared_weight": torch.ones(1)}, TypeError, "shared_weight: expected a float, got Ten"),
        ({"min_tokens": 1.5}, TypeError, "min_tokens: expected an int, got float"),
        ({"global_counts": FOUR}, ValueError, "tokens_per_rank: expected a Tensor, got None"),
        ({"tokens_per_rank": FOUR}, ValueError, "global_counts: expected a Tensor, got None"),
        (
            {"global_counts": FOUR.int(), "tokens_per_rank": FOUR},
            TypeError,
            "global_counts: expected int64, got int32",
        ),
        (
            {"global_counts": FOUR, "tokens_per_rank": FOUR[:3]},
            ValueError,
            r"tokens_per_rank: expected \[world_size=4\], got \[3\]",
        ),
        (
            {"global_counts": [1] * 4, "tokens_per_rank": FOUR},
            TypeError,
            "global_counts: expected a Tensor or None, got list",
        ),
    ],
)
def test_errors(change, error, match):
    call = {"topk_ids": torch.zeros(3, 2, dtype=torch.int64), "topk_weights": torch.zeros(3, 2)}
    call |= {"num_routed_experts": 8, "world_size": 4, "source_rank": 0, **change}
    with pytest.raises(error, match=match):
        waterfill(**call)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [5, 70])
def test_gradient_is_that_of_the_expansion(mode, num_tokens):
    """Where the shared expert goes does not change what the weights are worth."""
    ids = make_ids(num_tokens, 8, 2, absent=0.3)
    weights = torch.rand(num_tokens, 2, requires_grad=True)
    seed = torch.randn(num_tokens, 3)
    (got,) = torch.autograd.grad(waterfill(ids, weights, 8, 4, 1, mode=mode)[1], weights, seed)
    want = torch.where(ids >= 0, seed[:, :2], 0)
    assert torch.equal(got, want)
    out = expand_topk_with_shared_expert(ids, weights, 8, 4, 1)[1]
    assert torch.equal(torch.autograd.grad(out, weights, seed)[0], want)


@pytest.mark.parametrize("op", [waterfill, expand_topk_with_shared_expert])
def test_functional_and_forward_gradients_are_refused_by_name(op):
    ids, weights = make_ids(5, 8, 2), torch.rand(5, 2)

    def total(weights):
        return op(ids, weights, 8, 4, 1)[1].sum()

    with pytest.raises(NotImplementedError, match=f"^{op.__name__}: "):
        torch.func.grad(total)(weights)
    with pytest.raises(NotImplementedError, match=f"^{op.__name__}: "):
        torch.func.jvp(total, (weights,), (weights,))


@pytest.mark.parametrize("mode", MODES)
def test_opcheck(mode):
    ids, weights = make_ids(9, 8, 2, absent=0.2), torch.rand(9, 2)
    counts = (8, 4, 1, 0.4, mode, FOUR * 20, FOUR * 9, 2, torch.tensor(7))
    torch.library.opcheck(OP, (ids, weights, *counts))
    weights.requires_grad_()
    torch.library.opcheck(OP, (ids, weights, 8, 4, 1), test_utils=GRADIENT_CHECKS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()

    def call(ids, weights, counts, valid):
        return waterfill(
            *(ids, weights * 2, 8, 4, 1, 0.4),
            global_counts=counts[0],
            tokens_per_rank=counts[1],
            min_tokens=4,
            num_token_non_padded=valid,
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager")
    for num_tokens in (5, 9, 3):  # and at home
        ids, valid = make_ids(num_tokens, 8, 2, absent=0.2), torch.tensor(4)
        counts = torch.randint(0, 50, (2, 4))
        weights = torch.rand(num_tokens, 2)
        assert_same(compiled(ids, weights, counts, valid), call(ids, weights, counts, valid))
