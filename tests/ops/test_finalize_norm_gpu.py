# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of the finalize-norm ops: CPU bits on every path, graphs, devices."""

from dataclasses import replace

import pytest
import torch

from tests.ops.finalize_norm_cases import BF16, F16, F32, assert_same_bits, make

pytestmark = pytest.mark.gpu
on_both = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
# A leaf and less, warps and less, public models' widths, and around what each shape can hold.
NARROW = (*range(1, 10), 32, 64, 256, 264, 515, 1032, 2048, 2052, 2880, 3584, 4096, 5120, 6144)
WIDTHS = (*NARROW, 7168, 7176, 8192, 8200, 12288, 14336, 14344, 16384, 16392, 24568, 24575, 24576)


def assert_cuda_is_cpu(inputs, fp8) -> None:
    assert_same_bits(inputs.to("cuda").run(fp8), inputs.run(fp8))


@on_both
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, None], ids=["w32", "wb16", "w16", "w1"])
def test_dtypes(dtype, weight_dtype, fp8):
    for num_tokens, top_k, hidden in ((2, 8, 7168), (40, 3, 512), (300, 8, 1024)):
        gate = {2: dtype, 40: F32}.get(num_tokens)
        factor = 2.5 if top_k == 3 else 1.0
        inputs = make(
            num_tokens,
            top_k,
            hidden,
            dtype=dtype,
            weight_dtype=weight_dtype,
            gate=gate,
            factor=factor,
        )
        assert_cuda_is_cpu(inputs, fp8)


@on_both
# Tokens: every size of cluster, one block a token with one and with two kernels at a time.
@pytest.mark.parametrize("num_tokens", [1, 4, 12, 18, 24, 30, 40, 60, 100, 130, 150, 200, 280, 700])
def test_numbers_of_tokens(num_tokens, fp8):
    assert_cuda_is_cpu(make(num_tokens, 2, 7168, shared=num_tokens != 4), fp8)
    assert_cuda_is_cpu(make(num_tokens, 2, 2048, gate=F32), fp8)


@on_both
@pytest.mark.parametrize("hidden", WIDTHS)
def test_widths(hidden, fp8):
    for num_tokens in (1, 20, 70, 300):
        assert_cuda_is_cpu(make(num_tokens, 1, hidden, padded=hidden + 8), fp8)
    if hidden < 9000:
        assert_cuda_is_cpu(make(190, 1, hidden, padded=hidden + 8), fp8)
        assert_cuda_is_cpu(make(3, 1, hidden, dtype=F32), fp8)
        assert_cuda_is_cpu(make(150, 1, hidden, dtype=F32), fp8)


@on_both
# One block a token: a row in registers, and one that only shared memory holds.
@pytest.mark.parametrize(("num_tokens", "hidden"), [(300, 2880), (300, 3584), (3, 20480)])
def test_float32_rows_of_one_block(num_tokens, hidden, fp8):
    assert_cuda_is_cpu(make(num_tokens, 1, hidden, dtype=F32), fp8)
    assert_cuda_is_cpu(make(num_tokens, 8, hidden, dtype=F32, gate=F32), fp8)


@on_both
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10, 16, 33, 64])
def test_top_k(top_k, fp8):
    for num_tokens, hidden in ((1, 2048), (50, 1024), (50, 515), (300, 1024)):
        inputs = make(num_tokens, top_k, hidden, absent=0.3)
        assert_cuda_is_cpu(inputs, fp8)


@on_both
def test_layouts_and_the_scalar_path_give_the_same_bits(fp8, monkeypatch):
    for num_tokens in (1, 30, 100, 300):
        inputs = make(num_tokens, 4, 1032, padded=1040, device="cuda", gate=BF16)
        want = inputs.run(fp8)
        for name in ("gemm2_out", "shared", "residual", "norm_weight"):
            x = getattr(inputs, name)
            for shift in (1, 4):  # to a multiple of 2 and of 8 bytes
                moved = torch.empty(x.numel() + shift, dtype=x.dtype, device="cuda")
                moved = moved[shift:].view(x.shape).copy_(x)
                assert_same_bits(replace(inputs, **{name: moved}).run(fp8), want)
        for shift in (1, 2, 4):
            out = torch.empty(num_tokens * 1032 + shift, dtype=want[0].dtype, device="cuda")
            out = out[shift:].view(num_tokens, 1032)
            wide = torch.empty(num_tokens, 1032 + shift, dtype=BF16, device="cuda")
            got = inputs.run(fp8, out=out, residual_out=wide[:, shift:])
            assert_same_bits(got, want)
        with monkeypatch.context() as patch:
            patch.setenv("SGL_MOE_JIT_VECTOR", "0")
            assert_same_bits(inputs.run(fp8), want)


@on_both
def test_in_place_outputs(fp8):
    for num_tokens in (1, 30, 100, 300):
        inputs = make(num_tokens, 8, 2048, device="cuda")
        want = inputs.run(fp8)
        residual, shared = inputs.residual.clone(), inputs.shared.clone()
        given = {"residual_out": residual} if fp8 else {"residual_out": residual, "out": shared}
        got = replace(inputs, residual=residual, shared=shared).run(fp8, **given)
        assert_same_bits(got, want)


def test_a_token_alone_has_the_bits_it_has_in_a_batch():
    inputs = make(700, 8, 7168, device="cuda")
    want = inputs.run()
    for begin, end in ((0, 1), (699, 700), (5, 25), (100, 160), (300, 430), (450, 640), (0, 256)):
        got = inputs.tokens(begin, end).run()
        assert_same_bits(got, tuple(x[begin:end] for x in want))


def test_a_row_of_nan_and_infinities_is_the_same_on_every_path(monkeypatch):
    for num_tokens in (1, 30, 100, 300):
        inputs = make(num_tokens, 8, 1024, device="cuda")
        inputs.residual[:, 3] = float("nan")
        inputs.residual[1::2, 3] = float("inf")
        want = inputs.run(fp8=True)
        with monkeypatch.context() as patch:
            patch.setenv("SGL_MOE_JIT_VECTOR", "0")
            assert_same_bits(inputs.run(fp8=True), want)
        assert want[0].float().isnan().any(1).all()


def graph_of(function):
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@on_both
@pytest.mark.parametrize("num_tokens", [1, 24, 60, 300])
@pytest.mark.parametrize("pdl", [True, False])
def test_a_captured_graph_sees_new_inputs_on_each_replay(num_tokens, pdl, fp8):
    inputs = make(num_tokens, 8, 2048, device="cuda", gate=F32)
    graph, result = graph_of(lambda: inputs.run(fp8, enable_pdl=pdl))
    names = ("gemm2_out", "idx", "weights", "shared", "gate", "residual", "norm_weight")
    for seed in range(20):
        new = make(num_tokens, 8, 2048, seed=seed, gate=F32).to("cuda")
        for name in names:
            getattr(inputs, name).copy_(getattr(new, name))
        want = new.run(fp8, enable_pdl=False)
        for x in result:
            x.view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert_same_bits(result, want)


def test_a_chain_in_place_in_one_graph_is_the_chain_in_eager():
    """A layer's residual_out is the next one's residual, as in an engine, all with PDL."""

    def chain(layers, residual):
        for layer in layers:
            out, residual = replace(layer, residual=residual).run(residual_out=residual)
        return out, residual

    for num_tokens in (1, 16, 64, 200):
        layers = [make(num_tokens, 8, 1024, device="cuda", seed=i) for i in range(12)]
        want = chain(layers, layers[0].residual.clone())
        start = layers[0].residual.clone()
        graph, result = graph_of(lambda start=start, layers=layers: chain(layers, start))
        for _ in range(20):
            start.copy_(layers[0].residual)
            graph.replay()
            assert_same_bits(result, want)


@on_both
@pytest.mark.parametrize("num_tokens", [1, 24, 60, 200, 3000])
@pytest.mark.parametrize("hidden", [2048, 515])
def test_pdl_on_and_off_give_the_same_bits(num_tokens, hidden, fp8, monkeypatch):
    inputs = make(num_tokens, 4, hidden, device="cuda")
    want = inputs.run(fp8, enable_pdl=True)
    assert_same_bits(inputs.run(fp8, enable_pdl=False), want)
    monkeypatch.setenv("SGL_MOE_JIT_PDL", "0")
    assert_same_bits(inputs.run(fp8), want)


def test_runs_on_the_callers_current_stream():
    inputs = make(32, 8, 1024, device="cuda")
    want = inputs.run()
    late = replace(inputs, residual=torch.zeros_like(inputs.residual))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: the copy is still to come when we launch
        late.residual.copy_(inputs.residual)
        got = late.run()
    side.synchronize()
    assert_same_bits(got, want)


@on_both
def test_zero_tokens_under_capture(fp8):
    inputs = make(0, 8, 64, device="cuda")
    graph, result = graph_of(lambda: inputs.run(fp8))
    graph.replay()
    assert result[0].shape == (0, 64)


@pytest.mark.multigpu
def test_tensors_on_another_device_than_the_current_one():
    for num_tokens, hidden in ((4, 7168), (64, 7168), (300, 24575)):
        inputs = make(num_tokens, 2, hidden)
        with torch.cuda.device(0):
            got = inputs.to("cuda:1").run()
            assert got[0].device.index == 1 and torch.cuda.current_device() == 0
        assert_same_bits(got, inputs.run())
    mixed = replace(inputs.to("cuda:1"), residual=inputs.residual.to("cuda:0"))
    with pytest.raises(ValueError, match="residual: expected device cuda:1"):
        mixed.run()
