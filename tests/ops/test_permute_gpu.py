# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_permute on a GPU, bit for bit against the CPU op."""

import pytest
import torch

from sgl_moe_jit.ops import moe_permute

pytestmark = pytest.mark.gpu
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_ids(num_tokens, num_experts, top_k, dtype, absent, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    gone = torch.rand(ids.shape, generator=generator)
    ids[gone < absent] = -1
    ids[gone < absent / 2] = num_experts
    return ids.to(dtype)


def assert_equal_to_cpu(hidden, ids, num_experts, got=None, cpu=None):
    """Compare with the CPU op. ``cpu`` holds CPU copies when the caller has them."""
    rows, row_of, offsets = moe_permute(hidden, ids, num_experts) if got is None else got
    cpu_hidden, cpu_ids = cpu if cpu is not None else (hidden.cpu(), ids.cpu())
    want_rows, want_row_of, want_offsets = moe_permute(cpu_hidden, cpu_ids, num_experts)
    where = f"T,K={tuple(ids.shape)} E={num_experts} {hidden.dtype}"
    assert torch.equal(offsets.cpu(), want_offsets), f"{where}: offsets"
    wrong = (row_of.cpu() != want_row_of).nonzero()
    assert wrong.numel() == 0, f"{where}: {len(wrong)} rows differ, first at slot {wrong[:1]}"
    end = int(want_offsets[-1])
    bits = BITS[hidden.element_size()]
    assert torch.equal(rows[:end].cpu().view(bits), want_rows[:end].view(bits)), f"{where}: rows"


# Nothing; one; a few; a decode batch; one launch and one block and beyond; several hundred chunks.
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64, 300, 5000])
@pytest.mark.parametrize("num_experts", [1, 8, 60, 256, 896])
@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
def test_equal_to_the_cpu_op(num_tokens, num_experts, top_k):
    hidden = torch.randn(num_tokens, 40).bfloat16()
    for absent in (0.0, 0.3, 1.0):
        for dtype in (torch.int32, torch.int64):
            ids = random_ids(num_tokens, num_experts, top_k, dtype, absent)
            assert_equal_to_cpu(hidden.cuda(), ids.cuda(), num_experts, cpu=(hidden, ids))


# Both sides of a warp, of the one-launch limit (1024), of the one-block limit (4096), of a chunk;
# more than 2048 chunks of 256.
@pytest.mark.parametrize(
    "num_slots",
    [31, 32, 33, 1023, 1024, 1025, 4095, 4096, 4097, 6143, 6144, 6145, 700_001],
)
@pytest.mark.parametrize("num_experts", [1, 3, 1024, 4096])
def test_boundaries(num_slots, num_experts):
    hidden = torch.randn(num_slots, 8)
    ids = random_ids(num_slots, num_experts, 1, torch.int64, 0.1)
    assert_equal_to_cpu(hidden.cuda(), ids.cuda(), num_experts, cpu=(hidden, ids))


def test_all_slots_of_one_expert():
    for num_slots in (4096, 40_000):
        hidden = torch.randn(num_slots, 8)
        ids = torch.full((num_slots, 1), 59)
        assert_equal_to_cpu(hidden.cuda(), ids.cuda(), 60, cpu=(hidden, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 8, 4104, 7168])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_widths_alignments_and_strides(dtype, width, shift, monkeypatch):
    base = torch.randn(70, width + 5).to(dtype)
    ids = random_ids(70, 16, 4, torch.int32, 0.2)
    on_gpu = base.cuda()
    for vector in ("1", "0"):
        monkeypatch.setenv("SGL_MOE_JIT_VECTOR", vector)
        view = on_gpu[:, shift : shift + width]
        cpu = (base[:, shift : shift + width], ids)
        assert_equal_to_cpu(view, ids.cuda(), 16, cpu=cpu)
        packed = on_gpu.view(-1)[shift : shift + 70 * width].view(70, width)
        cpu = (base.view(-1)[shift : shift + 70 * width].view(70, width), ids)
        assert_equal_to_cpu(packed, ids.cuda(), 16, cpu=cpu)


@pytest.mark.parametrize("num_tokens", [64, 3000])
def test_capture_and_replay_with_changed_ids(num_tokens):
    hidden = torch.randn(num_tokens, 256).bfloat16()
    ids = random_ids(num_tokens, 60, 8, torch.int64, 0.2)
    hidden_gpu, ids_gpu = hidden.cuda(), ids.cuda()
    moe_permute(hidden_gpu, ids_gpu, 60)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moe_permute(hidden_gpu, ids_gpu, 60)
    for seed in range(1, 6):
        ids = random_ids(num_tokens, 60, 8, torch.int64, 0.2 * seed, seed)
        hidden = torch.randn(num_tokens, 256).bfloat16()
        ids_gpu.copy_(ids)
        hidden_gpu.copy_(hidden)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_to_cpu(hidden_gpu, ids_gpu, 60, got=got, cpu=(hidden, ids))


@pytest.mark.parametrize("num_tokens", [64, 5000])
def test_twenty_runs_and_no_pdl_are_bitwise_equal(num_tokens, monkeypatch):
    hidden = torch.randn(num_tokens, 512, device="cuda").bfloat16()
    ids = random_ids(num_tokens, 256, 8, torch.int32, 0.1).cuda()
    first = moe_permute(hidden, ids, 256)
    end = int(first[2][-1])
    for run in range(20):
        monkeypatch.setenv("SGL_MOE_JIT_PDL", str(run % 2))
        again = moe_permute(hidden, ids, 256)
        assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
        assert torch.equal(first[0][:end], again[0][:end])


@pytest.mark.field_report("M4")
def test_rows_without_a_slot_are_not_written():
    hidden = torch.randn(600, 64, device="cuda")
    ids = random_ids(600, 8, 2, torch.int32, 0.5).cuda()
    end = int(moe_permute(hidden, ids, 8)[2][-1])
    poison = torch.full((1200, 64), float("nan"), device="cuda")
    del poison  # its memory is what the next allocation of this size gets
    rows = moe_permute(hidden, ids, 8)[0]
    assert rows[:end].isfinite().all()
    assert rows[end:].isnan().all()


def test_ids_written_just_before_on_the_same_stream():
    """Back to back without a pause: the wait before the first read must hold in every kernel."""
    hidden = torch.randn(5000, 128).bfloat16()
    all_ids = [random_ids(5000, 64, 8, torch.int64, 0.1, seed) for seed in range(8)]
    hidden_gpu = hidden.cuda()
    sources = [x.cuda() for x in all_ids]
    ids = torch.empty_like(sources[0])
    results = []
    for source in sources:
        ids.copy_(source)
        results.append(moe_permute(hidden_gpu, ids, 64))
    for got, source in zip(results, all_ids, strict=True):
        assert_equal_to_cpu(hidden_gpu, source, 64, got=got, cpu=(hidden, source))


def test_on_a_side_stream():
    hidden = torch.randn(300, 64)
    ids = random_ids(300, 8, 2, torch.int32, 0.1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        hidden_gpu, ids_gpu = hidden.cuda(), ids.cuda()
        torch.cuda._sleep(10_000_000)
        hidden_gpu = hidden_gpu + 0
        got = moe_permute(hidden_gpu, ids_gpu, 8)
    stream.synchronize()
    assert_equal_to_cpu(hidden_gpu, ids_gpu, 8, got=got, cpu=(hidden, ids))


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    """5 GB of rows: row * width passes 2^31 elements."""
    num_tokens, width = 40_000, 8192
    hidden = torch.randn(num_tokens, width, device="cuda").bfloat16()
    ids = torch.randint(0, 32, (num_tokens, 8), device="cuda")
    rows, row_of, _ = moe_permute(hidden, ids, 32)
    assert rows.numel() > 2**31
    for k in (0, 7):
        assert torch.equal(rows[row_of[:, k].long()], hidden)


def test_devices_must_agree():
    with pytest.raises(ValueError, match="topk_ids: expected device cuda:0"):
        moe_permute(torch.zeros(2, 8, device="cuda"), torch.zeros(2, 1, dtype=torch.int32), 4)


def test_gradient_and_opcheck():
    hidden = torch.randn(50, 64, device="cuda", requires_grad=True)
    ids = random_ids(50, 8, 2, torch.int64, 0.3)
    rows, row_of, offsets = moe_permute(hidden, ids.cuda(), 8)
    seed = torch.randn_like(rows)
    seed[int(offsets[-1]) :] = float("nan")
    (grad,) = torch.autograd.grad(rows, hidden, seed)
    present = (row_of >= 0)[..., None]
    want = torch.where(present, seed[row_of.clamp(min=0).long()].double(), 0).sum(1).float()
    assert torch.equal(grad, want)
    full = torch.randint(0, 8, (50, 2), device="cuda")
    torch.library.opcheck(torch.ops.sgl_moe_jit.moe_permute.default, (hidden, full, 8))


@pytest.mark.field_report("M6")
def test_zero_tokens_leave_no_error_behind():
    for num_experts in (1, 256):
        ids = torch.zeros(0, 8, dtype=torch.int64, device="cuda")
        rows, row_of, offsets = moe_permute(torch.zeros(0, 64, device="cuda"), ids, num_experts)
        assert rows.shape == (0, 64) and row_of.shape == (0, 8)
        assert offsets.tolist() == [0] * num_experts
    assert torch.zeros(1).cuda().item() == 0
