# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Layer and block under ``torch.compile``: one graph, with and without deferral."""

import copy

import pytest
import torch
from functorch.compile import aot_module, nop
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.deferred import deferred_finalize_context
from sgl_moe_jit.ops.grouped_mm import grouped_mm
from tests.moe.layer_cases import H, Mlp, TopKGate, make_layer
from tests.moe.runner_cases import BF16, DEVICES, F32, make_input, make_topk

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counting(ops):
    """A backend that collects the names of the graph's operations."""

    def backend(graph, inputs):
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


def make_block(device="cpu", dtype=F32, gated=True):
    kind = {"device": device, "dtype": dtype}
    gate = torch.nn.Linear(H, 1, **kind) if gated else None
    return SharedExpertMoEBlock(TopKGate(**kind), make_layer(**kind), Mlp(**kind), gate)


@on_devices
@pytest.mark.parametrize("defer", [None, True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("gated", [True, False])
def test_a_block_is_one_graph_and_trains(device, defer, dtype, gated):
    block, ops = make_block(device, dtype, gated), []
    x = make_input(6, dtype=dtype, device=device).view(2, 3, H).requires_grad_()
    eager = block(x, defer=defer)
    (want,) = torch.autograd.grad(eager.sum(), x)
    compiled = torch.compile(block, fullgraph=True, backend=counting(ops))
    out = compiled(x, defer=defer)
    assert torch.equal(out, eager)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)
    fused = [op for op in ops if "moe_finalize_fuse_shared" in op]
    assert len(fused) == 1  # finished or not, it is the same op: the sum's or the block's
    adds = [op for op in ops if "add" in op and "addmm" not in op]
    assert bool(adds) is (defer is False)


@torch.no_grad()
@pytest.mark.parametrize("path", ["forward_normal", "forward_normal_dual_stream"])
def test_other_sizes_other_weights_and_no_tokens(path):
    block = make_block()
    compiled = torch.compile(getattr(block, path), fullgraph=True, backend="aot_eager")
    for num_tokens in (6, 7, 33, 1, 0):
        x = make_input(num_tokens)
        assert torch.equal(compiled(x), block(x))
    block.experts.w2_weight.mul_(2.0)
    x = make_input(7)
    assert torch.equal(compiled(x), block(x))


@torch.no_grad()
@field_report("C5")
@pytest.mark.parametrize("inside_first", [True, False])
def test_the_argument_decides_in_compiled_code_and_the_context_is_not_burned_in(inside_first):
    """Traced code cannot read the context: the argument decides there, else the gates."""
    block, x, ops = make_block(dtype=BF16), make_input(6, dtype=BF16), []
    finished, deferred = block(x, defer=False), block(x, defer=True)
    assert not torch.equal(finished, deferred)
    compiled = torch.compile(block, fullgraph=True, backend=counting(ops))
    for enabled in (inside_first, not inside_first):
        with deferred_finalize_context(enabled=enabled):
            assert torch.equal(compiled(x), deferred)
            assert torch.equal(compiled(x, defer=True), deferred)
            assert torch.equal(compiled(x, defer=False), finished)
            assert torch.equal(block(x), deferred if enabled else finished)


@on_devices
@torch.no_grad()
@pytest.mark.parametrize("defer", [True, False])
def test_a_layer_is_one_graph(device, defer):
    layer, x = make_layer(device=device, dtype=BF16), make_input(6, dtype=BF16, device=device)
    topk, shared = make_topk(6, device=device), make_input(6, dtype=BF16, seed=3, device=device)

    def finished(x):
        out = layer(x, topk, defer=defer)
        return out.finalize(shared) if defer else out + shared

    compiled = torch.compile(finished, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), finished(x))


@torch.no_grad()
@field_report("C5")
def test_a_layer_refuses_to_read_the_context_in_traced_code():
    layer, x, topk = make_layer(), make_input(6), make_topk(6)
    compiled = torch.compile(lambda x: layer(x, topk, defer=None), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="pass True or False in compiled code"):
        compiled(x)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("defer", [None, True, False])
def test_inductor(defer):
    block = make_block("cuda", BF16)
    x = make_input(64, dtype=BF16, device="cuda")
    out = torch.compile(block, fullgraph=True)(x, defer=defer)
    want = block.float()(x.float())
    # Inductor may keep float32 between operations: a few bfloat16 roundings of either
    assert (out - want).abs().max() <= 2.0**-6 * want.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fx_with_symbolic_sizes(dtype, pre_dispatch):
    """Its tracer does not count as compiling; a plan's texts would turn sizes into constants.

    In float32 torch has no shape rule for the experts' products.
    """
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp()).to(dtype)
    x, more = make_input(6, dtype=dtype), make_input(11, dtype=dtype)
    graph = make_fx(
        block, tracing_mode="symbolic", pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True
    )(x)
    assert torch.equal(graph(x), block(x)) and torch.equal(graph(more), block(more))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("make", [make_layer, make_block], ids=["layer", "block"])
def test_fx_with_the_weights_as_inputs(make, dtype, mode):
    """They are fake then, have no address to be known by, and no runner made of them is kept."""
    module, topk = make().to(dtype), make_topk(6)
    args = (topk,) if make is make_layer else ()
    x, state = make_input(6, dtype=dtype), dict(module.named_parameters())
    want = module(x, *args)

    def call(state, x):
        return functional_call(module, state, (x, *args))

    options = {"tracing_mode": mode, "_allow_non_fake_inputs": bool(args)}
    graph = make_fx(call, **options)(state, x)
    twice = {name: 2 * weight for name, weight in state.items()}
    assert torch.equal(graph(state, x), want) and torch.equal(module(x, *args), want)
    assert torch.equal(graph(twice, x), call(twice, x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_layer_keeps_no_runner_of_symbolic_sizes(dtype):
    """The trace is the first call; weights have values, and the sizes of inputs that they are."""
    block, x = make_block(dtype=dtype), make_input(6, dtype=dtype)
    want = copy.deepcopy(block)(x)
    state = dict(block.named_parameters())
    options = {"tracing_mode": "symbolic", "_allow_non_fake_inputs": True}
    graph = make_fx(lambda _, x: block(x), **options)(state, x)
    assert torch.equal(block(x), want) and torch.equal(graph(state, x), want)


@torch.no_grad()
@pytest.mark.parametrize("runner", ["native", "grouped_mm"])
def test_jit_trace_is_refused_by_name(runner):
    layer, topk, x = make_layer(runner=runner), make_topk(6), make_input(6)
    block = SharedExpertMoEBlock(TopKGate(), layer, Mlp())
    for call in (block, lambda x: layer(x, topk)):
        with pytest.raises(
            UnsupportedError, match=r"^torch\.jit\.trace: expected torch\.compile or"
        ):
            torch.jit.trace(call, (x,), check_trace=False)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_aot_module_traces_forward_and_backward(dtype):
    block = make_block().to(dtype)
    x = make_input(6, dtype=dtype).requires_grad_()
    want = torch.autograd.grad(block(x).sum(), x)
    traced = aot_module(block, nop)
    assert torch.equal(traced(x), block(x))
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), x), want)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_the_product_has_a_shape_on_meta(dtype):
    """An eager call without values, as a planner of memory makes it."""
    x, weight = (torch.empty(s, dtype=dtype, device="meta") for s in ((6, 16), (3, 16, 24)))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    out = grouped_mm(x, weight, ends)
    assert (out.shape, out.dtype, out.is_meta) == ((6, 24), dtype, True)


def test_fx_keeps_the_float32_gradient():
    x = torch.randn(6, 16)
    weight = torch.randn(3, 16, 24)
    ends = torch.tensor([1, 4, 6], dtype=torch.int32)

    def gradients(x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = grouped_mm(x, weight, ends.clone()).square().sum()
        return torch.autograd.grad(out, (x, weight))

    graph = make_fx(gradients, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x, weight)
    for got, want in zip(graph(x, weight), gradients(x, weight), strict=True):
        torch.testing.assert_close(got, want)
