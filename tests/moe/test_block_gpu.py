# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Two streams on a GPU: eager and captured, with memory under pressure, and weights that change."""

import threading

import pytest
import torch

from sgl_moe_jit.moe import streams
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from tests.moe.layer_cases import H, Mlp, TopKGate, make_layer
from tests.moe.runner_cases import BF16, make_input

pytestmark = pytest.mark.gpu
field_report = pytest.mark.field_report
LAYERS = 8
KIND = {"dtype": BF16, "device": "cuda"}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def make_block(**options):
    gate = torch.nn.Linear(H, 1, **KIND)
    return SharedExpertMoEBlock(TopKGate(**KIND), make_layer(**KIND), Mlp(**KIND), gate, **options)


def chain(blocks, x, path="forward"):
    for block in blocks:
        x = x + getattr(block, path)(x)
    return x


def watch_streams(blocks):
    """Return a set that collects the streams on which routed and shared experts run."""
    seen = {"routed": set(), "shared": set()}

    def hook(name):
        return lambda *args: seen[name].add(torch.cuda.current_stream().cuda_stream)

    for block in blocks:
        block.experts.register_forward_pre_hook(hook("routed"))
        block.shared_experts.register_forward_pre_hook(hook("shared"))
    return seen


def capture(function):
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


@field_report("C9")
@pytest.mark.parametrize("defer", [None, True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_eager_two_streams_give_the_bits_of_one(defer, num_tokens):
    blocks = [make_block(dual_stream=True) for _ in range(LAYERS)]
    x = make_input(num_tokens, **KIND)
    before = x.clone()
    want = x
    for block in blocks:
        want = want + block.forward_normal(want, defer=defer)
    seen = watch_streams(blocks)
    for _ in range(3):
        got = x
        for block in blocks:
            got = got + block(got, defer=defer)
        assert torch.equal(got, want)
    assert torch.equal(x, before)  # nobody frees or overwrites the caller's input
    assert len(seen["routed"]) == len(seen["shared"]) == 1
    assert seen["routed"] != seen["shared"]
    assert all(block.last_plan.dual_stream for block in blocks)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@field_report("C9")
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_capture_of_eight_layers_has_two_streams_and_replays(num_tokens):
    blocks = [make_block() for _ in range(LAYERS)]
    x = make_input(num_tokens, **KIND)
    graph, out = capture(lambda: chain(blocks, x))
    assert all(block.last_plan.dual_stream and block.last_plan.deferred for block in blocks)
    assert "inside a CUDA graph capture" in str(blocks[0].last_plan)
    for seed in range(3):
        x.copy_(make_input(num_tokens, seed=seed, **KIND))
        graph.replay()
        want = chain(blocks, x, "forward_normal")
        assert torch.equal(out, want)
    for block in blocks:  # as a weight update writes them: in place
        block.experts.w13_weight.mul_(0.5)
        block.experts.w2_weight.copy_(block.experts.w2_weight.flip(0))
        block.shared_experts.up_proj.weight.neg_()
        block.gate.proj.weight.copy_(block.gate.proj.weight.flip(0))
    graph.replay()
    assert torch.equal(out, chain(blocks, x, "forward_normal"))


def test_the_streams_of_one_capture_are_two():
    blocks = [make_block() for _ in range(LAYERS)]
    x = make_input(16, **KIND)
    chain(blocks, x)
    torch.cuda.synchronize()
    seen = watch_streams(blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(blocks, x)
    assert len(seen["routed"]) == len(seen["shared"]) == 1
    assert len(seen["routed"] | seen["shared"]) == 2
    graph.replay()
    assert torch.equal(out, chain(blocks, x, "forward_normal"))


@field_report("C8")
def test_eager_memory_is_not_handed_on_while_a_stream_still_reads_it():
    """A slow shared expert, a dropped input, and fresh memory of the same size filled with 93."""
    block, size = make_block(dual_stream=True), (512, H)
    x = make_input(size[0], **KIND)
    want = block.forward_normal(x)
    inner = block.shared_experts

    class Slow(torch.nn.Module):
        def forward(self, x):
            torch.cuda._sleep(20_000_000)
            out = inner(x)
            torch.cuda._sleep(20_000_000)
            return out + 0

    block.shared_experts = Slow()
    for _ in range(4):
        mine = x.clone()
        out = block(mine)
        del mine
        for _ in range(8):
            torch.full(size, 93.0, **KIND)
        with torch.cuda.stream(streams.alternate_stream(torch.cuda.current_stream())):
            for _ in range(8):
                torch.full(size, 93.0, **KIND)
        assert torch.equal(out, want)


@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_after_an_exception_streams_and_results_are_as_before(part):
    block, x = make_block(dual_stream=True), make_input(9, **KIND)
    want = block(x)

    def fail(*args):
        raise KeyError(part)

    handle = getattr(block, part).register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match=part):
        block(x)
    handle.remove()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(block(x), want)


def test_a_callers_own_stream_is_the_main_one():
    block, x = make_block(dual_stream=True), make_input(9, **KIND)
    want = block(x)
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        seen = watch_streams([block])
        out = block(x)
    own.synchronize()
    assert seen["routed"] == {own.cuda_stream}
    assert torch.equal(out, want)
    alternate = streams.alternate_stream(torch.cuda.current_stream())
    alternate.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(alternate):  # then another one is the alternate
        seen = watch_streams([block])
        assert torch.equal(block(x), want)
    assert seen["routed"] == {alternate.cuda_stream} and not seen["routed"] & seen["shared"]


def test_each_thread_has_an_alternate_stream_of_its_own():
    main, found = torch.cuda.current_stream(), []
    mine = streams.alternate_stream(main)
    assert streams.alternate_stream(main) is mine != main
    other = streams.alternate_stream(mine)
    assert other != mine and streams.alternate_stream(mine) is other
    thread = threading.Thread(target=lambda: found.append(streams.alternate_stream(main)))
    thread.start()
    thread.join()
    assert found[0] is not mine


def test_zero_tokens_in_a_capture():
    block, x = make_block(), torch.empty(0, H, **KIND)
    other = make_input(3, **KIND)
    graph, (out, doubled) = capture(lambda: (block(x), other * 2))  # no graph may be empty
    graph.replay()
    assert out.shape == (0, H) and torch.equal(doubled, other * 2)
    assert not block.last_plan.dual_stream


def test_gradients_take_one_stream():
    block, x = make_block(dual_stream=True), make_input(9, **KIND)
    with torch.enable_grad():
        block(x).sum().backward()
    assert "gradients: no, needed" in block.last_plan.refusals
    assert block.shared_experts.up_proj.weight.grad.any()
