# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused models under ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
import transformers

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers import EXPERTS_IMPLEMENTATION, load_block
from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse
from sgl_moe_jit.integrations.transformers import unfuse_shared_experts as unfuse

from .tiny_models import (
    BLOCK_ROUNDINGS,
    FUSED_FAMILIES,
    HIDDEN,
    assert_close,
    build,
    last_block,
    moe_blocks,
    tokens,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_moe", "gpt_oss"])
@torch.no_grad()
def test_a_bfloat16_model_is_one_graph(family):
    model, ids = build(family).bfloat16(), tokens()
    if family in FUSED_FAMILIES:
        assert fuse(model).fused
    else:
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    eager = model(ids).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids).logits, eager)
    assert torch.equal(compiled(ids).logits, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_a_block_is_one_graph_with_the_fused_op_in_it_and_trains(family, dtype):
    block = last_block(family).to(dtype)
    fuse(block)
    x = torch.randn(2, 3, HIDDEN, dtype=dtype, requires_grad=True)
    eager = block(x)
    (expected,) = torch.autograd.grad(eager.sum(), x)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    got = torch.compile(block, fullgraph=True, backend=backend)(x)
    assert torch.equal(got, eager)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], expected)
    assert sum("moe_finalize_fuse_shared" in target for target in targets) == 1


@torch.no_grad()
def test_a_layer_that_only_the_native_runner_serves_breaks_the_graph():
    block, x = last_block("deepseek_v3").half(), torch.randn(2, 3, HIDDEN).half()
    fuse(block)
    eager = block(x)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(block, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(block, backend="eager")(x), eager)


@pytest.mark.field_report("A25")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_generate_compiles_its_decode_step_into_one_graph(family):
    model, ids = build(family), tokens()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    stock = model.generate(ids, **settings)
    assert fuse(model).fused
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    how = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    how._compile_all_devices = True  # else on GPUs alone
    got = model.generate(ids, cache_implementation="static", compile_config=how, **settings)
    assert torch.equal(got, stock)
    assert sum("moe_finalize_fuse_shared" in target for target in targets) == len(moe_blocks(model))


@torch.no_grad()
def test_a_block_compiled_in_the_default_mode():
    block, x = last_block("deepseek_v3"), torch.randn(2, 3, HIDDEN)
    fuse(block)
    got = torch.compile(block, fullgraph=True)(x)
    assert_close(got, block(x), BLOCK_ROUNDINGS, "inductor")


def refuses_jit_trace(block, x):
    for _ in range(2):  # then with what an eager call has left
        with pytest.raises(
            UnsupportedError, match=r"^torch\.jit\.trace: .* use one of them, or, of"
        ):
            torch.jit.trace(block, (x,), check_trace=False)
        block(x)
    return True


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_jit_trace_is_refused_by_name_until_the_model_runs_its_own_code():
    model, x = build("deepseek_v3"), torch.randn(2, 3, HIDDEN)
    block = list(moe_blocks(model).values())[-1]
    assert refuses_jit_trace(load_block(block), x)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    assert refuses_jit_trace(block, x)
    fuse(model)
    assert refuses_jit_trace(block, x)
    unfuse(model)
    model.set_experts_implementation("eager")
    assert torch.equal(torch.jit.trace(block, (x,), check_trace=False)(x), block(x))
