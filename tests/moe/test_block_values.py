# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``SharedExpertMoEBlock``'s values: against float64, with hooks, adapters, gradients, autocast."""

import copy
import functools
import pickle

import pytest
import torch

from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.router import Router
from sgl_moe_jit.moe.router_config import RouterConfig
from tests.moe.layer_cases import E, FakeRunner, H, Mlp, TopKGate, logged_block, make_layer
from tests.moe.runner_cases import BF16, DEVICES, F32, make_input, oracle

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)


def tolerance(want, absolute, dtype):
    """Four roundings along the routed way and four along the shared, through two dot products."""
    rounding = 2.0**-8 if dtype == BF16 else 2.0**-20
    scale = torch.maximum(absolute, absolute.mean(1, keepdim=True)) + 1
    return rounding * (8 * scale + want.abs())


@on_devices
@torch.no_grad()
@field_report("C6")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("defer", [True, False])
def test_values_against_float64(device, dtype, gated, factor, defer):
    kind = {"dtype": dtype, "device": device}
    layer, gate = make_layer(**kind), TopKGate(factor=factor, **kind)
    shared = Mlp(**kind)
    shared_gate = torch.nn.Linear(H, 1, **kind) if gated else None
    block = SharedExpertMoEBlock(gate, layer, shared, shared_gate)
    x = make_input(12, dtype=dtype, device=device)
    got = block(x.view(3, 4, H), defer=defer)
    assert got.shape == (3, 4, H) and got.dtype == dtype
    topk, weights = gate(x), layer.expert_weights()
    wide = copy.deepcopy(shared).double()(x.double())
    if gated:
        wide = torch.sigmoid(copy.deepcopy(shared_gate).double()(x.double())) * wide
    want = oracle(weights, x, topk, wide)
    error = (got.view(12, H).double() - want).abs()
    allowed = tolerance(want, oracle(weights, x, topk, wide, absolute=True), dtype)
    assert (error <= allowed).all(), f"worst {float((error / allowed).max()):.3g} of allowed"
    strided = torch.stack((x, x), -1)[..., 0]
    assert torch.equal(block(strided, defer=defer), got.view(12, H))


@torch.no_grad()
@field_report("A26")
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_gate_of_zero_weight_counts_half_and_no_gate_counts_one(defer, dtype):
    x, shared = make_input(5, dtype=dtype), Mlp(dtype=dtype)
    layer, gate = make_layer(dtype=dtype), torch.nn.Linear(H, 1, bias=False, dtype=dtype)
    layer.w2_weight.zero_()
    gate.weight.zero_()
    router = TopKGate(dtype=dtype)
    half = SharedExpertMoEBlock(router, layer, shared, gate)(x, defer=defer)
    assert torch.equal(half, 0.5 * shared(x))
    assert torch.equal(SharedExpertMoEBlock(router, layer, shared)(x, defer=defer), shared(x))


@torch.no_grad()
@field_report("A26")
@pytest.mark.parametrize("says", [True, False])
def test_the_shared_gate_sees_the_blocks_own_input(says):
    seen, x = [], make_input(5)
    gate = torch.nn.Linear(H, 1)
    gate.register_forward_pre_hook(lambda m, args: seen.append(args[0].clone()))
    logged_block(FakeRunner([], says=says, does=says), gate=gate)(x.clone())
    assert len(seen) == 1 and torch.equal(seen[0], x)


@torch.no_grad()
@field_report("A21")
def test_a_hook_on_the_experts_gets_a_tensor_and_everyone_elses_fire():
    block, x, seen = logged_block(FakeRunner([])), make_input(5), {}
    want = block(x, defer=False)
    assert block(x) is not None and block.last_plan.deferred
    for name, child in block.named_children():
        child.register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    assert torch.equal(block(x, defer=True), want)
    assert seen.keys() == {"gate", "experts", "shared_experts"}
    assert isinstance(seen["experts"], torch.Tensor)
    assert "experts: no, a hook on them expects a tensor" in block.last_plan.refusals


class Adapter(torch.nn.Module):
    """Passes on positional arguments only, as many wrappers do."""

    def __init__(self, base, scale=1.0):
        super().__init__()
        self.base, self.scale = base, torch.nn.Parameter(torch.tensor(scale))

    def forward(self, *args):
        return self.base(*args) * self.scale


@field_report("A19")
def test_adapters_on_every_part_take_effect_and_train():
    x = make_input(5)
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(), torch.nn.Linear(H, 1))
    with torch.no_grad():
        plain = block(x)
    block.gate.proj = Adapter(block.gate.proj, 1.5)
    block.experts = Adapter(block.experts, 2.0)
    block.shared_experts.up_proj = Adapter(block.shared_experts.up_proj, 3.0)
    block.shared_expert_gate = Adapter(block.shared_expert_gate, 0.5)
    out = block(x)
    assert "a Adapter, called as it is" in str(block.last_plan)
    topk = block.gate(x)
    weights = block.experts.base.expert_weights()
    gate = torch.sigmoid(block.shared_expert_gate(x))
    want = 2.0 * oracle(weights, x, topk) + (gate * block.shared_experts(x)).double()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out, plain)
    out.square().sum().backward()
    adapters = [m for m in block.modules() if isinstance(m, Adapter)]
    assert len(adapters) == 4
    for adapter in adapters:
        assert adapter.scale.grad is not None and adapter.scale.grad != 0


@field_report("A17")
@pytest.mark.parametrize("who", ["x", "gate", "experts", "shared_experts", "shared_expert_gate"])
@pytest.mark.parametrize("defer", [True, False])
def test_gradients_equal_a_plain_torch_block(who, defer):
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(), torch.nn.Linear(H, 1))
    x = make_input(9)
    for p in block.parameters():
        p.requires_grad_(False)
    wanted = [x] if who == "x" else list(getattr(block, who).parameters())
    for leaf in wanted:
        leaf.requires_grad_()
    seed = torch.randn_like(x)
    got = torch.autograd.grad((block(x, defer=defer) * seed).sum(), wanted)
    topk = block.gate(x)
    shared = torch.sigmoid(block.shared_expert_gate(x)) * block.shared_experts(x)
    plain = oracle(block.experts.expert_weights(), x, topk, shared)
    want = torch.autograd.grad((plain * seed).sum(), wanted)
    for a, b in zip(got, want, strict=True):
        # float32 sums of at most 64 products three deep, relative to the largest gradient
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))


@torch.no_grad()
@field_report("A14")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("x_dtype", [BF16, F32])
def test_autocast(dtype, x_dtype):
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(), torch.nn.Linear(H, 1)).to(dtype)
    x = make_input(6).to(x_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(x)
    want = block.float()(x.float())
    assert (out - want).abs().max() <= 2.0**-6 * want.abs().max()
    # as torch promotes routed (input's dtype) plus shared (autocast's)
    assert out.dtype == (BF16 if x_dtype == BF16 else F32)


@torch.no_grad()
def test_padded_rows_get_no_expert_and_disturb_nobody():
    """As docs/integration.md has it: the router knows the number of tokens."""
    config = RouterConfig(E, 2, "softmax", renormalize=True)
    router = Router(config, H, dtype=F32)
    torch.nn.init.normal_(router.weight)
    shared, layer = Mlp(), make_layer()
    x = make_input(6)
    want = SharedExpertMoEBlock(router, layer, shared)(x)
    count = torch.tensor(4)
    gate = functools.partial(router, num_token_non_padded=count)
    for rest in (x[4:], torch.full_like(x[4:], float("nan"))):
        for defer in (True, False):
            padded = torch.cat((x[:4], rest))
            got = SharedExpertMoEBlock(gate, layer, shared)(padded, defer=defer)
            torch.testing.assert_close(got[:4], want[:4])  # an expert's GEMM has fewer rows
            assert torch.equal(got[4:].nan_to_num(7.0), shared(padded)[4:].nan_to_num(7.0))


@torch.no_grad()
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(again):
    block = SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(), torch.nn.Linear(H, 1))
    x = make_input(6)
    block(x)
    twin = again(block)
    assert torch.equal(twin(x), block(x))
    twin.experts.w2_weight.zero_()
    assert not torch.equal(twin(x), block(x))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: SharedExpertMoEBlock(TopKGate(), make_layer(), None, torch.nn.Linear(H, 1)),
            ValueError,
            "shared_expert_gate: expected None without shared_experts",
        ),
        (
            lambda: SharedExpertMoEBlock(TopKGate(), make_layer(), reduce_results=True),
            ValueError,
            "reduce_results: expected experts with a tp_group or an ep_group",
        ),
        (
            lambda: SharedExpertMoEBlock(torch.nn.Linear(H, E), make_layer())(make_input(2)),
            TypeError,
            "gate: expected a StandardTopKOutput, .* got Tensor; pass read_gate=",
        ),
        (
            lambda: SharedExpertMoEBlock(TopKGate(), make_layer(), Mlp(out=16))(make_input(2)),
            ValueError,
            r"shared_experts: expected an output of \(2, 32\), got \(2, 16\)",
        ),
        (
            lambda: SharedExpertMoEBlock(TopKGate(), make_layer(), lambda x: (x, None))(
                make_input(2)
            ),
            TypeError,
            "shared_experts: expected to return a tensor, got tuple",
        ),
    ],
)
def test_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
