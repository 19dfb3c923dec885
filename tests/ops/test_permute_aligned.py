# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute with an alignment on a CPU, and which path serves which size on a GPU."""

import pytest
import torch

from sgl_moe_jit.ops import moe_permute, reference_permute
from sgl_moe_jit.ops.permute import MAX_ALIGNMENT, _max_rows, expert_row_counts, permute_on
from sgl_moe_jit.ops.permute_kernel import PermutePath, choose_path

OP = torch.ops.sgl_moe_jit.moe_permute.default


def check(hidden, ids, num_experts, alignment):
    rows, row_of, offsets = moe_permute(hidden, ids, num_experts, alignment=alignment)
    want = reference_permute.moe_permute(hidden, ids, num_experts, alignment)
    end = int(want[2][-1])
    assert rows.shape[0] % alignment == 0 and rows.shape[0] >= end, (rows.shape, end)
    assert rows.dtype == hidden.dtype and rows.shape[1] == hidden.shape[1]
    assert torch.equal(row_of, want[1]), (row_of, want[1])
    assert torch.equal(offsets, want[2]), (offsets, want[2])
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[hidden.element_size()]
    assert torch.equal(rows[:end].view(bits), want[0].view(bits))


def test_by_hand():
    hidden = torch.tensor([[1.0], [2.0], [3.0]])
    ids = torch.tensor([[3, 0], [-1, 3], [0, 3]])  # experts 0 and 3 of four; expert 3 fills a tile
    rows, row_of, offsets = moe_permute(hidden, ids, 4, alignment=3)
    assert row_of.tolist() == [[3, 0], [-1, 4], [1, 5]]
    assert offsets.tolist() == [3, 3, 3, 6]
    assert rows.shape == (12, 1)  # 6 slots, 4 experts: (6 + 4 * 2) // 3 * 3
    assert rows[:6, 0].tolist() == [1.0, 3.0, 0.0, 1.0, 2.0, 3.0]
    assert expert_row_counts(ids, 4).tolist() == [2, 0, 0, 3]


# No token; one; an odd count; more threads than one. One expert; more experts than slots.
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4)])
@pytest.mark.parametrize("alignment", [1, 2, 3, 128, MAX_ALIGNMENT])
def test_against_reference(num_tokens, num_experts, top_k, alignment):
    ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k))
    check(torch.randn(num_tokens, 24).bfloat16(), ids, num_experts, alignment)
    check(torch.randn(num_tokens, 3), ids.int(), num_experts, alignment)


def test_alignment_one_is_the_plain_permute_bit_for_bit():
    hidden, ids = torch.randn(50, 16), torch.randint(-1, 6, (50, 3))
    end = int(moe_permute(hidden, ids, 6)[2][-1])
    for plain, aligned in zip(
        moe_permute(hidden, ids, 6), moe_permute(hidden, ids, 6, alignment=1), strict=True
    ):
        assert plain.shape == aligned.shape and torch.equal(plain[:end], aligned[:end])


@pytest.mark.parametrize("alignment", [2, 5, 16])
def test_the_row_bound_holds_and_is_reached(alignment):
    reached = set()
    for num_experts in (1, 3, 8):
        for num_slots in range(40):
            bound = _max_rows(num_slots, num_experts, alignment)
            # The worst ids: as many experts as there are, all but one of them with one slot.
            worst = torch.arange(num_slots).clamp(max=num_experts - 1)
            counts = expert_row_counts(worst, num_experts)
            rows = int((-(-counts // alignment) * alignment).sum())
            assert rows <= bound
            if rows == bound:
                reached.add(num_experts)
    assert reached == {1, 3, 8}


def test_a_gemm_over_the_padding_makes_no_nan():
    hidden = torch.randn(5, 8)
    ids = torch.tensor([[0, 2], [2, 1], [2, -1], [0, 2], [2, 0]])
    poison = torch.full((20, 8), float("nan"))
    del poison  # its memory is likely what the rows get
    rows, _, offsets = moe_permute(hidden, ids, 3, alignment=4)
    begins = [0, *offsets.tolist()][:-1]
    for begin, count, end in zip(
        begins, expert_row_counts(ids, 3).tolist(), offsets.tolist(), strict=True
    ):
        assert begin % 4 == 0 and end % 4 == 0 and 0 <= end - begin - count < 4
        assert rows[begin : begin + count].isfinite().all()
        assert rows[begin + count : end].view(torch.int32).eq(0).all()


def test_more_than_one_thread_gives_the_same_rows():
    hidden, ids = torch.randn(700, 1024), torch.randint(-1, 16, (700, 4))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            results.append(moe_permute(hidden, ids, 16, alignment=100))
    finally:
        torch.set_num_threads(threads)
    end = int(results[0][2][-1])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0][:end], results[1][0][:end])


@pytest.mark.parametrize("alignment", [0, -1, MAX_ALIGNMENT + 1])
def test_an_alignment_out_of_range_is_refused(alignment):
    hidden, ids = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"alignment: expected 1 to 1024, got {alignment}"):
        moe_permute(hidden, ids, 4, alignment=alignment)


def test_rows_beyond_32_bits_are_refused():
    num_tokens = 2**31 - 2**20  # fits by itself, but not with 4096 experts of 1023 rows of padding
    hidden = torch.zeros(1, 1).expand(num_tokens, 1)
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(num_tokens, 1)
    with pytest.raises(ValueError, match=r"topk_ids: expected below 2\^31 rows with padding to 10"):
        moe_permute(hidden, ids, 4096, alignment=1024)


def test_counts_of_any_integers_and_none():
    ids = torch.tensor([[5, -1, 2**40], [0, 5, -(2**40)]])
    counts = expert_row_counts(ids, 6)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 0, 0, 0, 0, 2]
    assert expert_row_counts(torch.zeros(0, 2, dtype=torch.int32), 3).tolist() == [0, 0, 0]


@pytest.mark.field_report("A17")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradient_ignores_the_padding(dtype):
    ids = torch.tensor([[0, 2], [-1, 1], [3, -1], [1, 1]])
    hidden = torch.randn(4, 8).to(dtype).requires_grad_()
    rows, row_of, offsets = moe_permute(hidden, ids, 3, alignment=4)
    assert offsets.tolist() == [4, 8, 12]
    seed = torch.randn(rows.shape).to(dtype)
    used = torch.zeros(rows.shape[0], dtype=torch.bool)
    used[row_of[row_of >= 0].long()] = True
    seed[~used] = float("nan")
    (grad,) = torch.autograd.grad(rows, hidden, seed)
    want = torch.zeros(4, 8, dtype=torch.float64)
    for token in range(4):
        for row in row_of[token].tolist():
            if row >= 0:
                want[token] += seed[row].double()
    torch.testing.assert_close(grad.double(), want.to(dtype).double(), rtol=0, atol=0)


def test_gradcheck_and_second_gradient():
    ids = torch.tensor([[0, 2], [2, 1], [1, 0]])  # 4 rows an expert, and none beyond them
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: moe_permute(x, ids, 3, alignment=4)[0], (hidden,))
    torch.autograd.gradgradcheck(lambda x: moe_permute(x, ids, 3, alignment=4)[0] ** 2, (hidden,))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    # One slot an expert: as many rows as there can be, so that all of them are defined.
    hidden = torch.randn(2, 8, requires_grad=requires_grad)
    torch.library.opcheck(OP, (hidden, torch.tensor([[2, 0], [3, 1]]), 4, 8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()

    def function(x, ids):
        rows, row_of, offsets = moe_permute(x * 2, ids, 4, alignment=8)
        return rows, row_of, offsets, expert_row_counts(ids, 4)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")
    for num_tokens in (3, 5, 1, 0):
        hidden, ids = torch.randn(num_tokens, 8), torch.randint(-1, 5, (num_tokens, 2))
        got, want = compiled(hidden, ids), function(hidden, ids)
        end = int(want[2][-1])
        assert got[0].shape == want[0].shape
        assert torch.equal(got[0][:end], want[0][:end])
        for g, w in zip(got[1:], want[1:], strict=True):
            assert torch.equal(g, w)


def test_dynamic_shapes_under_aot():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids: moe_permute(x, ids, 4, alignment=8)[0].shape,
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for num_tokens in (3, 50, 2):
        ids = torch.randint(0, 4, (num_tokens, 2))
        assert compiled(torch.randn(num_tokens, 8), ids)[0] == _max_rows(num_tokens * 2, 4, 8)


def test_fake_tensors_get_the_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids = torch.zeros(5, 3, dtype=torch.int64)
        rows, row_of, offsets = moe_permute(torch.empty(5, 8).half(), ids, 7, alignment=64)
    assert (rows.shape, row_of.shape, offsets.shape) == ((448, 8), (5, 3), (7,))
    assert (rows.dtype, row_of.dtype, offsets.dtype) == (torch.float16, torch.int32, torch.int32)


def test_paths_by_size():
    one, two, four = PermutePath
    assert choose_path(0, 8, 2) == choose_path(4096, 256, 8) == choose_path(64, 1024, 64) == one
    assert choose_path(4096, 1025, 8) == choose_path(65, 8, 65) == two
    assert choose_path(4097, 8, 1) == four


def test_a_path_is_of_no_effect_on_a_cpu():
    hidden, ids = torch.randn(3, 8), torch.randint(0, 4, (3, 2))
    for path in PermutePath:
        assert torch.equal(permute_on(path, hidden, ids, 4)[0], moe_permute(hidden, ids, 4)[0])
