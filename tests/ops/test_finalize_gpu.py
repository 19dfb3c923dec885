# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: CUDA and CPU bits, graphs, streams, devices, PDL."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.jit import current_arch, load_spec, parallel
from sgl_moe_jit.ops.cpp_types import CPP_TYPES
from sgl_moe_jit.ops.finalize_kernel import (
    UNROLLED_TOP_K,
    WEIGHT_TYPES,
    cuda_spec,
)
from tests.ops.finalize_cases import BF16, F16, F32, assert_same_bits, bits, make

pytestmark = pytest.mark.gpu
field_report = pytest.mark.field_report


def shapes() -> dict[str, tuple[int, int]]:
    """(tokens, hidden) that take each launch shape of csrc/moe/finalize.cu with bfloat16 rows."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "scalar": (5, 515),
        "4 bytes alone fit": (5, 1030),
        "8 bytes alone fit": (5, 1028),
        "tiny": (3, 1024),
        "small": (160 * sms // 256 + 1, 2048),
        "middle": (400 * sms // 256 + 1, 2048),
        "large": (1150 * sms // 256 + 1, 2048),
    }


@pytest.fixture(scope="module", autouse=True)
def _built_side_by_side():
    """Every module of this file at once: one after another they take minutes."""
    wanted = {(BF16, F32, top_k, gate) for top_k in (0, *UNROLLED_TOP_K) for gate in (False, True)}
    for dtype in CPP_TYPES:
        for weight in WEIGHT_TYPES:
            wanted |= {(dtype, weight, 8, False), (dtype, weight, 0, True)}
    arch = current_arch()
    parallel.run_all(
        lambda key: load_spec(cuda_spec(*key[:3], arch, gate=key[3])), sorted(wanted, key=str)
    )


SHAPES = [
    *("scalar", "4 bytes alone fit", "8 bytes alone fit"),
    *("tiny", "small", "middle", "large"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, None], ids=["w32", "w16", "wh", "unit"])
def test_cuda_and_cpu_give_the_same_bits(shape, dtype, weight_dtype):
    num_tokens, hidden = shapes()[shape]
    for top_k, gate in ((8, None), (3, F32)):
        inputs = make(
            num_tokens,
            top_k,
            hidden,
            dtype=dtype,
            weight_dtype=weight_dtype,
            factor=2.5 if top_k == 3 else 1.0,
            gate=gate,
            shared=gate is not None or top_k == 8,
        )
        assert_same_bits(inputs.to("cuda").run().cpu(), inputs.run())


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 22, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("gate", [None, F32], ids=["plain", "gated"])
def test_every_top_k_gives_the_cpus_bits(top_k, gate):
    for num_tokens, hidden in ((3, 1024), (3, 515), (200, 2048)):
        inputs = make(num_tokens, top_k, hidden, gate=gate, factor=0.5)
        assert_same_bits(inputs.to("cuda").run().cpu(), inputs.run())


@field_report("M8")
@field_report("M14")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_a_row_alone_and_any_alignment_give_the_same_bits(shape, dtype, monkeypatch):
    num_tokens, hidden = shapes()[shape]
    inputs = make(num_tokens, 8, hidden, dtype=dtype, factor=2.5).to("cuda")
    want = inputs.run()
    for begin, end in ((0, 1), (num_tokens - 2, num_tokens), (0, num_tokens // 2)):
        assert_same_bits(inputs.tokens(begin, end).run(), want[begin:end])
    for which in ("gemm2_out", "idx", "weights", "shared"):
        x = getattr(inputs, which)
        storage = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
        moved = storage[1:].view(x.shape).copy_(x)  # one element off alignment
        assert_same_bits(replace(inputs, **{which: moved}).run(), want)
    monkeypatch.setenv("SGL_MOE_JIT_VECTOR", "0")
    assert_same_bits(inputs.run(), want)


def test_more_tokens_than_a_grids_second_dimension():
    inputs = make(65_535 + 3, 1, 64, absent=0.1)
    assert_same_bits(inputs.to("cuda").run().cpu(), inputs.run())


def graph_of(function):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@field_report("M6")
def test_zero_tokens_under_capture():
    inputs = make(0, 8, 64, device="cuda")
    graph, result = graph_of(inputs.run)
    graph.replay()
    assert result.shape == (0, 64)


@pytest.mark.parametrize("num_tokens", [1, 16, 300])
@pytest.mark.parametrize("pdl", [True, False])
def test_a_captured_graph_sees_new_inputs_on_each_replay(num_tokens, pdl):
    inputs = make(num_tokens, 8, 7168, device="cuda")
    graph, result = graph_of(lambda: inputs.run(enable_pdl=pdl))
    for seed in range(100):
        new = make(num_tokens, 8, 7168, seed=seed).to("cuda") if seed % 20 == 0 else inputs
        order = torch.randperm(inputs.idx.numel(), device="cuda")
        for mine, fresh in zip(
            (inputs.gemm2_out, inputs.idx, inputs.weights, inputs.shared),
            (new.gemm2_out, new.idx, new.weights, new.shared),
            strict=True,
        ):
            mine.copy_(fresh)
        inputs.idx.copy_(inputs.idx.reshape(-1)[order].view_as(inputs.idx))
        inputs.weights.mul_(0.75)
        want = inputs.run(enable_pdl=False)
        result.fill_(float("nan"))
        graph.replay()
        assert_same_bits(result, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_pdl_on_and_off_give_the_same_bits(shape, monkeypatch):
    num_tokens, hidden = shapes()[shape]
    inputs = make(num_tokens, 8, hidden, device="cuda")
    want = inputs.run(enable_pdl=True)
    assert_same_bits(inputs.run(enable_pdl=False), want)
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
    assert_same_bits(inputs.run(), want)


@field_report("J38")
def test_runs_on_the_callers_current_stream():
    inputs = make(32, 8, 1024, device="cuda")
    want = inputs.run()
    late = replace(inputs, shared=torch.zeros_like(inputs.shared))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: the fill is still to come when we launch
        late.shared.copy_(inputs.shared)
        got = late.run()
    side.synchronize()
    assert_same_bits(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = late.run()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, want)


def test_dual_stream():
    inputs = make(64, 8, 7168, device="cuda")
    want = inputs.run()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(20):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shared = inputs.shared * 1
        main.wait_stream(side)
        shared.record_stream(main)
        assert_same_bits(replace(inputs, shared=shared).run(), want)


@pytest.mark.multigpu
@field_report("J37")
def test_tensors_on_another_device_than_the_current_one():
    inputs = make(64, 8, 7168)
    with torch.cuda.device(0):
        got = inputs.to("cuda:1").run()
        assert got.device.index == 1 and torch.cuda.current_device() == 0
    assert_same_bits(got.cpu(), inputs.run())
    mixed = replace(inputs.to("cuda:1"), shared=inputs.shared.to("cuda:0"))
    with pytest.raises(ValueError, match="shared_output: expected device cuda:1"):
        mixed.run()


@field_report("J37")
def test_the_device_guard_leaves_the_current_device():
    make(4, 8, 64, device="cuda").run()
    assert torch.cuda.current_device() == 0


@field_report("M10")
@field_report("M11")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
    reason="PDL needs sm_90",
)
@pytest.mark.parametrize("late", ["gemm2_out", "idx", "weights", "shared", "gate"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_read_before_a_late_predecessor_has_written(pdl, late, shape):
    """The producer lets us start, sleeps, then writes; old data would show in every run."""
    num_tokens, hidden = shapes()[shape]
    inputs = make(num_tokens, 4, hidden, device="cuda", absent=0.0, gate=F32)
    x = getattr(inputs, late)
    new = x.clone()
    # idx gets other valid rows, so that a stale read is no fault
    old = x.flip(0).contiguous() if late in ("idx", "weights") else (x * 0 + 3)
    want = inputs.run(enable_pdl=False)
    out = torch.empty_like(want)
    consumed = torch.empty_like(want)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):  # times 5 late tensors: 1000 runs a launch shape
        x.copy_(old)
        out.fill_(float("nan"))
        pdl.produce_late(x, new)
        inputs.run(enable_pdl=True, out=out)
        pdl.consume(consumed, out)  # M11: a consumer that waits sees our output
        wrong += (bits(consumed) != bits(want)).sum()
    assert int(wrong) == 0


@field_report("M10")
def test_pdl_below_sm_90_is_ignored():
    from sgl_moe_jit.jit import CudaArch

    assert not CudaArch(8, 0).supports_pdl and CudaArch(9, 0, "a").supports_pdl
