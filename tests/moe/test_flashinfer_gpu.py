# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The adapter's own work on a device: no synchronisation, and a graph that sees new inputs.

The function called is a stand-in whose expert rows are the token's own row, so the output is the
token times the sum of its weights.
"""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.runners.flashinfer_trtllm import FlashInferTrtllmRunner
from sgl_moe_jit.moe.topk import PackedTopKOutput, StandardTopKOutput
from tests.moe.flashinfer_cases import BF16, K, T, make_layer
from tests.moe.flashinfer_signatures import recorded
from tests.moe.runner_cases import DEVICES

on_devices = pytest.mark.parametrize("device", DEVICES)


def on(device, weights):
    moved = {name: tensor.to(device) for name, tensor in weights.tensors()}
    return FlashInferWeights(**{**vars(weights), **moved})


def stand_in(name, first_row=0):
    signature = recorded()["0.7.4"][name]

    def function(*args, **kwargs):
        a = signature.bind(*args, **kwargs).arguments
        x, weights = a["hidden_states"], a["topk_ids"]
        if isinstance(weights, tuple):
            weights = weights[1]
        else:
            weights = (weights << 16).view(torch.float32).to(BF16)
        if "hidden_states_scale" in a:
            scale = a["hidden_states_scale"].t().repeat_interleave(128, 1)
            x = (x.float() * scale).to(BF16)
        index = torch.arange(x.shape[0] * K, dtype=torch.int32, device=x.device) + first_row
        if a["do_finalize"]:
            return (x.float() * weights.float().sum(1, keepdim=True)).to(BF16)
        return [x.repeat_interleave(K, 0), weights, index]

    function.__signature__ = signature
    return function


def make_runner(quantization, device, **options):
    names = [name for name in recorded()["0.7.4"] if name.startswith("trtllm")]
    functions = FlashInferFunctions("0.7.4", {name: stand_in(name, **options) for name in names})
    return FlashInferTrtllmRunner(on(device, make_layer(quantization).weights), functions=functions)


@on_devices
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.FP8_BLOCK], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("defer", [True, False])
def test_no_synchronisation_and_graphs_see_new_inputs(device, quantization, packed, defer):
    runner = make_runner(quantization, device)
    x = torch.randint(-4, 5, (T, 128), device=device).to(BF16)
    # halves: exact in bfloat16
    topk = StandardTopKOutput(
        torch.full((T, K), 0.5, device=device), torch.zeros(T, K, dtype=torch.int64, device=device)
    )
    topk = replace(topk, routed_scaling_factor=2.0)
    if packed:
        topk = PackedTopKOutput.pack(topk)

    def call():
        out = runner.run(x, topk, defer=defer)
        return out.finalize() if defer else out

    def right(out):
        # FP8_BLOCK quantizes the input: 2^-4 of a value
        bound = 0 if quantization is Quantization.NONE else 2**-3
        return ((out.float() - 2 * x.float()).abs() <= bound * x.abs()).all()

    assert right(call())
    if device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    x.copy_(torch.randint(-4, 5, (T, 128), device=device))
    graph.replay()
    assert right(out)


@on_devices
def test_the_index_is_checked_on_a_cpu_and_on_request(device, monkeypatch):
    runner = make_runner(Quantization.NONE, device, first_row=1)
    x = torch.ones(T, 128, device=device, dtype=BF16)
    ids = torch.zeros(T, K, dtype=torch.int64, device=device)
    topk = StandardTopKOutput(torch.ones(T, K, device=device), ids)
    if device == "cuda":
        runner.run(x, topk, defer=True)
        monkeypatch.setenv("SGL_MOE_JIT_CHECK_INDICES", "1")
    with pytest.raises(UnsupportedError, match="indices below the 10 rows, got 10 at slot 9"):
        runner.run(x, topk, defer=True)
