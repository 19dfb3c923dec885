# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every path of moe_permute on a GPU: the CPU op's bits, graphs, and programmatic launches."""

import pytest
import torch

from sgl_moe_jit.ops import moe_permute
from sgl_moe_jit.ops.permute import permute_on
from sgl_moe_jit.ops.permute_kernel import PermutePath, launch
from tests.ops.test_permute_gpu import BITS, random_ids

pytestmark = pytest.mark.gpu
paths = pytest.mark.parametrize("path", list(PermutePath), ids=lambda path: path.name.lower())
alignments = pytest.mark.parametrize("alignment", [1, 8])


def assert_same(got, want, where=""):
    """Compare all rows that exist, bit for bit; ``want`` on any device."""
    end = int(want[2][-1])
    names = ("rows", "row_of", "expert_offsets")
    for name, g, w in zip(names, got, want, strict=True):
        assert g.shape == w.shape, f"{where}: {name} {tuple(g.shape)}, expected {tuple(w.shape)}"
        g, w = (g[:end], w[:end]) if name == "rows" else (g, w)
        bits = BITS[g.element_size()]
        wrong = (g.cpu().contiguous().view(bits) != w.cpu().contiguous().view(bits)).nonzero()
        assert len(wrong) == 0, f"{where}: {name}: {len(wrong)} differ, first at {wrong[0]}"


# T: nothing; decode; a step of 512 ids and its neighbours; most that one launch takes.
# (E, K): one expert; fewer slots than a vector of targets; two vectors; most that one launch takes.
@paths
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64, 300, 511, 512, 513, 4096])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (256, 8), (60, 9), (1024, 64)])
@pytest.mark.parametrize("alignment", [1, 3, 16, 128])
def test_equal_to_the_cpu_op(path, num_tokens, num_experts, top_k, alignment):
    num_tokens = min(num_tokens, 4096 // top_k)
    hidden = torch.randn(num_tokens, 40).bfloat16()
    for absent, dtype in ((0.0, torch.int64), (0.3, torch.int32), (1.0, torch.int64)):
        ids = random_ids(num_tokens, num_experts, top_k, dtype, absent)
        got = permute_on(path, hidden.cuda(), ids.cuda(), num_experts, alignment)
        want = moe_permute(hidden, ids, num_experts, alignment=alignment)
        assert_same(got, want, f"absent {absent} {dtype}")


# Widths: less than a word a thread; several words a thread; more than a thread asks for ahead.
@paths
@alignments
@pytest.mark.parametrize("width", [0, 1, 7, 264, 7168, 40_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_widths_and_views(path, alignment, width, dtype, monkeypatch):
    num_tokens = 130 if width < 1000 else 9
    base = torch.randn(num_tokens, width + 3).to(dtype)
    ids = random_ids(num_tokens, 16, 4, torch.int32, 0.2)
    on_gpu = base.cuda()
    for shift, vector in ((0, "1"), (1, "1"), (0, "0")):
        monkeypatch.setenv("SGL_MOE_JIT_VECTOR", vector)
        view = slice(shift, shift + width)
        got = permute_on(path, on_gpu[:, view], ids.cuda(), 16, alignment)
        want = moe_permute(base[:, view], ids, 16, alignment=alignment)
        assert_same(got, want, f"shift {shift} vector {vector}")
        packed = on_gpu.view(-1)[: num_tokens * width].view(num_tokens, width)
        got = permute_on(path, packed, ids.cuda(), 16, alignment)
        want = moe_permute(packed.cpu(), ids, 16, alignment=alignment)
        assert_same(got, want, f"packed, vector {vector}")


@pytest.mark.parametrize("alignment", [1, 100, 1024])
def test_many_slots_with_an_alignment(alignment):
    hidden = torch.randn(40_000, 24)
    for num_experts in (3, 4096):
        ids = random_ids(40_000, num_experts, 2, torch.int64, 0.1)
        got = moe_permute(hidden.cuda(), ids.cuda(), num_experts, alignment=alignment)
        assert_same(got, moe_permute(hidden, ids, num_experts, alignment=alignment))


def test_rows_beyond_the_last_expert_are_not_written():
    hidden = torch.randn(60, 64, device="cuda")
    ids = random_ids(60, 8, 2, torch.int32, 0.5).cuda()
    for path in PermutePath:
        rows = torch.full((176, 64), float("nan"), device="cuda")  # (120 + 8 * 7) // 8 * 8
        row_of = torch.empty(60, 2, dtype=torch.int32, device="cuda")
        offsets = torch.empty(8, dtype=torch.int32, device="cuda")
        launch((rows, row_of, offsets), hidden, ids, 8, path=path)
        end = int(offsets[-1])
        assert rows[:end].isfinite().all() and rows[end:].isnan().all(), path


def test_a_size_that_one_launch_cannot_serve_is_refused():
    hidden = torch.zeros(4097, 8, device="cuda")
    one = PermutePath.ONE_LAUNCH
    for num_tokens, top_k, num_experts in ((4097, 1, 8), (4, 1, 1025), (4, 65, 8)):
        ids = torch.zeros(num_tokens, top_k, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match="path: one launch takes at most 4096 slots, 1024 exp"):
            permute_on(one, hidden[:num_tokens], ids, num_experts)


@paths
@alignments
def test_twenty_runs_and_no_pdl_give_the_same_bits(path, alignment, monkeypatch):
    hidden = torch.randn(128, 1024, device="cuda").bfloat16()
    ids = random_ids(128, 256, 8, torch.int32, 0.1).cuda()
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
    want = permute_on(path, hidden, ids, 256, alignment)
    for run in range(20):
        monkeypatch.setenv("SGL_MOE_JIT_PDL", "1" if run < 18 else "0")
        assert_same(permute_on(path, hidden, ids, 256, alignment), want, f"run {run}")


@paths
@alignments
@pytest.mark.parametrize("pdl", ["1", "0"])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_capture_and_replay_with_changed_inputs(path, alignment, pdl, num_tokens, monkeypatch):
    monkeypatch.setenv("SGL_MOE_JIT_PDL", pdl)
    hidden = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    ids = random_ids(num_tokens, 60, 8, torch.int64, 0.2).cuda()
    permute_on(path, hidden, ids, 60, alignment)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = permute_on(path, hidden, ids, 60, alignment)
    for seed in range(1, 12):
        new_ids = random_ids(num_tokens, 60, 8, torch.int64, 0.1 * (seed % 11), seed)
        new_hidden = torch.randn(num_tokens, 256).bfloat16()
        ids.copy_(new_ids)
        hidden.copy_(new_hidden)
        got[0].fill_(float("nan"))
        got[1].fill_(-7)
        got[2].fill_(-7)
        graph.replay()
        assert_same(got, moe_permute(new_hidden, new_ids, 60, alignment=alignment), f"{seed}")


needs_pdl = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
    reason="PDL needs sm_90",
)
RUNS = 250  # times two inputs with and without alignment: 1000 late reads a path


@needs_pdl
@pytest.mark.field_report("M10")
@paths
@alignments
@pytest.mark.parametrize("late", ["ids", "hidden"])
def test_nothing_is_read_before_a_late_predecessor_has_written(
    pdl, path, alignment, late, monkeypatch
):
    """The producer lets us start, sleeps, then writes; old data would show in every run."""
    hidden = torch.randn(40, 264, device="cuda").bfloat16()
    ids = random_ids(40, 16, 4, torch.int64, 0.1).cuda()
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
    want = permute_on(path, hidden, ids, 16, alignment)
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "1")
    x = ids if late == "ids" else hidden
    new, old = x.clone(), x.flip(0).contiguous()  # valid ids too, so that a stale read is no fault
    got = tuple(torch.empty_like(output) for output in want)
    consumed = torch.empty_like(want[0])
    for run in range(RUNS):
        x.copy_(old)
        for output in (*got, consumed):
            output.fill_(-7)
        pdl.produce_late(x, new)
        launch(got, hidden, ids, alignment, path=path)
        pdl.consume(consumed, got[0])  # a consumer that waits sees our rows
        assert_same((consumed, *got[1:]), want, f"run {run}")


@needs_pdl
@pytest.mark.field_report("M10")
@paths
@alignments
@pytest.mark.parametrize("which", [0, 1, 2], ids=["rows", "row_of", "expert_offsets"])
def test_nothing_is_written_before_a_late_predecessor_has_read(pdl, path, alignment, which):
    """The memory of an output may have been given back while its last reader still runs."""
    hidden = torch.randn(40, 264, device="cuda").bfloat16()
    ids = random_ids(40, 16, 4, torch.int64, 0.1).cuda()
    want = moe_permute(hidden.cpu(), ids.cpu(), 16, alignment=alignment)
    got = tuple(torch.empty_like(output, device="cuda") for output in want)
    read = torch.empty_like(got[which])
    before = torch.full_like(read, -7)
    for run in range(RUNS):
        got[which].copy_(before)
        pdl.produce_late(read, got[which])
        launch(got, hidden, ids, alignment, path=path)
        assert torch.equal(read, before), f"run {run}: overwritten while it was read"
        assert_same(got, want, f"run {run}")
