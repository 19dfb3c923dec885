# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute on a CPU: values, layouts, errors, autograd, torch.compile."""

import pytest
import torch

from sgl_moe_jit.ops import moe_permute, reference_permute
from sgl_moe_jit.ops.permute import MAX_EXPERTS

field_report = pytest.mark.field_report
OP = torch.ops.sgl_moe_jit.moe_permute.default


def check(hidden, ids, num_experts):
    rows, row_of, offsets = moe_permute(hidden, ids, num_experts)
    want_rows, want_row_of, want_offsets = reference_permute.moe_permute(hidden, ids, num_experts)
    num_rows = int(want_offsets[-1])
    assert rows.shape == (ids.numel(), hidden.shape[1]) and rows.dtype == hidden.dtype
    assert row_of.dtype == offsets.dtype == torch.int32
    assert torch.equal(row_of, want_row_of), (row_of, want_row_of)
    assert torch.equal(offsets, want_offsets), (offsets, want_offsets)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[hidden.element_size()]
    assert torch.equal(rows[:num_rows].view(bits), want_rows.view(bits))


def test_by_hand():
    hidden = torch.tensor([[1.0], [2.0], [3.0]])
    ids = torch.tensor([[2, 0], [-1, 2], [0, 3]])  # 3 == num_experts: no expert here
    rows, row_of, offsets = moe_permute(hidden, ids, 3)
    assert row_of.tolist() == [[2, 0], [-1, 3], [1, -1]]
    assert offsets.tolist() == [2, 2, 4]
    assert rows[:4, 0].tolist() == [1.0, 3.0, 1.0, 2.0]


# No token; one; an odd count; more threads than one. One expert; many more than tokens.
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (896, 16), (MAX_EXPERTS, 8)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_against_reference(num_tokens, num_experts, top_k, id_dtype):
    ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k), dtype=id_dtype)
    check(torch.randn(num_tokens, 24), ids, num_experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_payloads_are_copied_bit_for_bit(dtype):
    hidden = torch.randn(9, 33).to(dtype)
    hidden[2] = float("nan")
    hidden[3] = -0.0
    check(hidden, torch.randint(-1, 5, (9, 3)), 5)


def test_strided_rows_unaligned_rows_and_strided_ids():
    base = torch.randn(8, 50)
    ids = torch.randint(-1, 6, (8, 5))
    check(base[:, 1:34], ids[:, :3], 6)  # row stride 50, 4 bytes off
    check(base[1:2].expand(8, 50), ids.t().contiguous().t(), 6)
    check(torch.randn(8, 0), ids, 6)
    check(base, ids[:, :0], 6)


def test_large_ids_do_not_wrap():
    ids = torch.tensor([[2**32, 2**31, -(2**31), 1, 2**32 + 1]])
    assert moe_permute(torch.ones(1, 4), ids, 2)[1].tolist() == [[-1, -1, -1, 0, -1]]


def test_more_than_one_thread_gives_the_same_rows():
    hidden, ids = torch.randn(700, 1024), torch.randint(-1, 16, (700, 4))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = moe_permute(hidden, ids, 16)
        torch.set_num_threads(4)
        together = moe_permute(hidden, ids, 16)
    finally:
        torch.set_num_threads(threads)
    end = int(alone[2][-1])
    assert torch.equal(alone[1], together[1]) and torch.equal(alone[0][:end], together[0][:end])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"ids": torch.zeros(3, 2, dtype=torch.int16)}, TypeError, "topk_ids: expected int32"),
        ({"ids": torch.zeros(3, 2)}, TypeError, "topk_ids: expected int32 or int64, got float32"),
        ({"ids": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, r"topk_ids: expected \[3, top"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, ValueError, r"topk_ids: expected \[3, top_k"),
        (
            {"hidden": torch.zeros(3, 8, dtype=torch.int32)},
            TypeError,
            "hidden_states: expected bfl",
        ),
        ({"hidden": torch.zeros(3, 8, 1)}, ValueError, r"hidden_states: expected \[num_tokens, hi"),
        ({"hidden": torch.zeros(8, 3).t()}, ValueError, "hidden_states: expected adjacent columns"),
        ({"num_experts": "4"}, TypeError, "num_experts: expected an int, got str"),
        ({"num_experts": True}, TypeError, "num_experts: expected an int, got bool"),
        ({"alignment": None}, TypeError, "alignment: expected an int, got NoneType"),
        ({"ids": [[0]]}, TypeError, "topk_ids: expected a Tensor, got list"),
        ({"num_experts": 0}, ValueError, "num_experts: expected 1 to 4096, got 0"),
        ({"num_experts": 4097}, ValueError, "num_experts: expected 1 to 4096, got 4097"),
    ],
)
def test_errors(change, error, match):
    call = {"hidden": torch.zeros(3, 8), "ids": torch.zeros(3, 2, dtype=torch.int64)}
    call = {**call, "num_experts": 4, "alignment": 1, **change}
    with pytest.raises(error, match=match):
        moe_permute(call["hidden"], call["ids"], call["num_experts"], alignment=call["alignment"])


def test_too_many_slots_are_refused_and_not_wrapped():
    hidden = torch.zeros(1, 1).expand(2**28, 1)
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)
    with pytest.raises(ValueError, match=r"num_tokens \* top_k below 2\^31"):
        moe_permute(hidden, ids, 4)


@field_report("A17")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ids", [[[0, 2], [-1, 1], [3, -1], [1, 1]], [[-1, 3]] * 4])
def test_gradient_is_the_sum_of_the_rows(dtype, ids):
    ids = torch.tensor(ids)
    hidden = torch.randn(4, 8).to(dtype).requires_grad_()
    rows, row_of, offsets = moe_permute(hidden, ids, 3)
    end = int(offsets[-1])
    seed = torch.randn(rows.shape).to(dtype)
    seed[end:] = float("nan")  # rows without a slot: their gradient may be anything
    (grad,) = torch.autograd.grad(rows, hidden, seed)
    want = torch.zeros(4, 8, dtype=torch.float64)
    for token in range(4):
        for row in row_of[token].tolist():
            if row >= 0:
                want[token] += seed[row].double()
    # one rounding of at most two terms, and none where a single row was copied
    torch.testing.assert_close(grad.double(), want.to(dtype).double(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("top_k", "hidden_dim"), [(2, 0), (0, 8)])
def test_gradient_of_rows_without_columns_or_slots(dtype, top_k, hidden_dim):
    hidden = torch.randn(3, hidden_dim, dtype=dtype, requires_grad=True)
    rows, _, _ = moe_permute(hidden, torch.zeros(3, top_k, dtype=torch.int32), 3)
    (grad,) = torch.autograd.grad(rows.sum(), hidden)
    assert torch.equal(grad, torch.zeros(3, hidden_dim, dtype=dtype))


def test_gradcheck_and_second_gradient():
    ids = torch.tensor([[0, 2], [2, 1], [1, 0]])
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: moe_permute(x, ids, 3)[0], (hidden,))
    torch.autograd.gradgradcheck(lambda x: moe_permute(x, ids, 3)[0] ** 2, (hidden,))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    # Every slot has a row: opcheck compares values, and rows without a slot have none.
    hidden = torch.randn(5, 8, requires_grad=requires_grad)
    torch.library.opcheck(OP, (hidden, torch.randint(0, 4, (5, 2)), 4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids: moe_permute(x * 2, ids, 4), fullgraph=True, dynamic=dynamic, backend="eager"
    )
    for num_tokens in (3, 5, 0):
        hidden, ids = torch.randn(num_tokens, 8), torch.randint(-1, 5, (num_tokens, 2))
        got, want = compiled(hidden, ids), moe_permute(hidden * 2, ids, 4)
        end = int(want[2][-1])
        assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
        assert torch.equal(got[0][:end], want[0][:end])


def test_fake_tensors_get_the_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(5, 3, dtype=torch.int64)
        rows, row_of, offsets = moe_permute(torch.empty(5, 8, dtype=torch.bfloat16), ids, 7)
    assert (rows.shape, row_of.shape, offsets.shape) == ((15, 8), (5, 3), (7,))
    assert (rows.dtype, row_of.dtype, offsets.dtype) == (torch.bfloat16, torch.int32, torch.int32)
