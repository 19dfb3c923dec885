# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routing under torch.compile(fullgraph=True), and captured in CUDA graphs."""

import pytest
import torch

from sgl_moe_jit.moe.router import Router
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.moe.topk import BypassedTopKOutput, PackedTopKOutput
from tests.moe.routing_cases import CONFIGS, E
from tests.moe.routing_oracle import spread_logits
from tests.moe.test_routing import extras

HIDDEN = 48


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()  # each config is a recompilation of one function, up to a limit


def route(logits, bias, scale, count, routing):
    output = select_experts(logits, routing, bias, expert_scale=scale, num_token_non_padded=count)
    return output.topk_ids, output.topk_weights


@pytest.mark.parametrize("name", CONFIGS)
def test_no_graph_break(name):
    routing = CONFIGS[name]
    bias, scale = extras(routing)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens, count in ((6, 6), (9, 4)):
        logits = spread_logits(num_tokens, E, seed=num_tokens)
        got = compiled(logits, bias, scale, torch.tensor(count), routing)
        expected = route(logits, bias, scale, torch.tensor(count), routing)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# One with every step, through the compiler: ties, -0.0 and NaN must survive its rewriting.
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor_keeps_ties_and_nan(device):
    routing = CONFIGS["sigmoid_groups"]
    bias = torch.zeros(E, device=device)
    logits = spread_logits(8, E).to(device)
    logits[1], logits[2], logits[3, ::2] = float("nan"), 0.0, -0.0
    compiled = torch.compile(route, fullgraph=True)
    count = torch.tensor(7, device=device)
    got = compiled(logits, bias, None, count, routing)
    expected = route(logits, bias, None, count, routing)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=2**-20, atol=0, equal_nan=True)


def test_a_compiled_router_with_packed_output_under_autocast():
    router = Router(CONFIGS["sigmoid_groups"], HIDDEN)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            output = router(x)
        return PackedTopKOutput.pack(output).packed_ids

    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), step(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_graph_follows_its_inputs(name):
    routing = CONFIGS[name]
    router = Router(routing, HIDDEN, device="cuda", dtype=torch.bfloat16)
    bias, _ = extras(routing)
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    x = torch.randn(16, HIDDEN, device="cuda", dtype=torch.bfloat16)
    count = torch.tensor(16, device="cuda", dtype=torch.int32)

    def step():
        output = router.bypass(x, num_token_non_padded=count).to_standard()
        return output.topk_ids, output.topk_weights, PackedTopKOutput.pack(output).packed_ids

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for real in (16, 3, 0, 9):
            x.normal_()
            x[real:] = float("nan")
            count.fill_(real)
            graph.replay()
            for got, expected in zip(captured, step(), strict=True):
                assert torch.equal(got, expected)
            assert bool((captured[0][real:] == -1).all()) and not captured[1][real:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_and_cuda_choose_the_same_experts(dtype):
    routing = CONFIGS["softmax_of_top_k"]  # on the logits: no function whose bits differ
    logits = torch.randn(4096, E).to(dtype)
    on_cpu = BypassedTopKOutput(logits, routing).to_standard()
    on_cuda = BypassedTopKOutput(logits.cuda(), routing).to_standard()
    assert torch.equal(on_cpu.topk_ids, on_cuda.topk_ids.cpu())
