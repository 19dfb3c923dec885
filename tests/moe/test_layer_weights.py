# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A layer's parameters: shared, updated, differentiated, adapted, moved, and never copied."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import parametrize

from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.prepared_layer import PreparedMoE
from tests.moe.layer_cases import FakeRunner, LiveBytes, fake_config, make_layer
from tests.moe.runner_cases import (
    BF16,
    DEVICES,
    F32,
    RUNNERS,
    assert_close,
    make_input,
    make_topk,
    make_weights,
    oracle,
)

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)


def assert_right(layer, x, topk):
    assert_close(layer(x, topk).detach(), layer.expert_weights(), x, topk, None)


def test_parameters_are_the_same_objects_and_tensors_share_storage():
    weights = make_weights()
    up = torch.nn.Parameter(weights.up)
    layer = FusedMoE.from_w13_w2(up, weights.down)
    assert layer.w13_weight is up
    assert layer.w2_weight.data_ptr() == weights.down.data_ptr()
    assert not layer.w2_weight.requires_grad
    x, topk = make_input(5), make_topk(5)
    weights.down.mul_(3.0)  # through the caller's own tensor
    assert_right(layer, x, topk)


def _copy(layer, new):
    with torch.no_grad():
        layer.w13_weight.copy_(new["w13_weight"])
        layer.w2_weight.copy_(new["w2_weight"])


def _load(layer, new):
    layer.load_state_dict(new)


def _assign(layer, new):
    layer.load_state_dict(new, assign=True)


def _data(layer, new):
    layer.w13_weight.data = new["w13_weight"].clone()
    layer.w2_weight.data = new["w2_weight"].clone()


def _data_strided(layer, new):
    # the same values behind other strides
    layer.w13_weight.data = new["w13_weight"].transpose(1, 2).contiguous().transpose(1, 2)
    layer.w2_weight.data = new["w2_weight"].clone()


def _replace(layer, new):
    layer.w13_weight = torch.nn.Parameter(new["w13_weight"].clone())
    layer.w2_weight = torch.nn.Parameter(new["w2_weight"].clone())


def _step(layer, new):
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for name, p in layer.named_parameters():
        p.grad = p.detach() - new[name]
    optimizer.step()


@on_devices
@field_report("A20")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "update",
    [_copy, _load, _assign, _data, _data_strided, _replace, _step],
    ids=lambda u: u.__name__,
)
def test_the_next_call_sees_an_update(device, runner, update):
    layer = make_layer(runner=runner, device=device)
    x, topk = make_input(7, device=device), make_topk(7, device=device)
    before = layer(x, topk).detach()
    new = {name: torch.randn_like(p) / 5 for name, p in layer.state_dict().items()}
    update(layer, new)
    assert_right(layer, x, topk)
    assert not torch.equal(layer(x, topk), before)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, new[name], rtol=1e-6, atol=1e-6)


@field_report("A20")
def test_conversions_take_another_runner_where_they_have_to():
    layer, x, topk = make_layer(), make_input(7), make_topk(7)
    assert layer.runner.name == "grouped_mm"
    layer(x, topk)
    layer.double()
    assert layer.runner.name == "native"
    assert layer(x.double(), topk).dtype == torch.float64
    layer.to(BF16)
    assert layer.runner.name == "grouped_mm"
    assert_right(layer, x.to(BF16), topk)
    apart = torch.empty(6, 32, 17, dtype=BF16)[..., :16]  # rows no longer on 16 bytes
    layer.w2_weight.data = apart.copy_(layer.w2_weight.data)
    assert layer.runner.name == "native"
    assert_right(layer, x.to(BF16), topk)


@field_report("A20")
def test_another_activation_is_seen_too():
    layer, x, topk = make_layer(), make_input(7), make_topk(7)
    before = layer(x, topk)
    layer.activation, layer.is_silu_and_mul = lambda v: v[..., ::2] * v[..., 1::2], False
    assert_right(layer, x, topk)
    assert not torch.equal(layer(x, topk), before)


@field_report("A20")
@pytest.mark.parametrize("runner", RUNNERS)
@torch.no_grad()
def test_nothing_of_the_size_of_a_weight_stays_or_is_ever_made(runner):
    layer = make_layer(hidden=64, width=64, experts=8, runner=runner)
    x, topk = make_input(4, 64), make_topk(4)
    with LiveBytes() as bytes_made:
        layer(x, topk)
        assert bytes_made.now == 0
    smallest = min(p.numel() for p in layer.parameters()) * 4
    assert bytes_made.peak < smallest


@on_devices
@field_report("A17")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("leaves", ["x", "router", "experts"])
@pytest.mark.parametrize("defer", [True, False])
def test_gradients_equal_the_float64_oracles(device, runner, leaves, defer):
    layer = make_layer(runner=runner, device=device)
    x, topk = make_input(9, device=device), make_topk(9, factor=2.5, absent=0.3, device=device)
    named = {"x": [x], "router": [topk.topk_weights], "experts": list(layer.parameters())}
    for p in layer.parameters():
        p.requires_grad_(leaves == "experts")
    wanted = [leaf.requires_grad_() for leaf in named[leaves]]
    seed = torch.randn(x.shape, device=device)
    out = layer(x, topk, defer=defer)
    out = out.finalize() if defer else out
    got = torch.autograd.grad((out * seed).sum(), wanted)
    want = torch.autograd.grad((oracle(layer.expert_weights(), x, topk) * seed).sum(), wanted)
    for a, b in zip(got, want, strict=True):
        # float32 sums of at most 64 products three deep, relative to the largest gradient
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(b.abs().max()))


@field_report("A17")
def test_train_no_grad_and_inference_mode_change_no_bit():
    layer, x, topk = make_layer(), make_input(7), make_topk(7)
    expected = layer.eval()(x, topk).detach()
    assert torch.equal(layer.train()(x, topk).detach(), expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = layer(x, topk)
        assert not got.requires_grad and torch.equal(got, expected)


class LowRank(torch.nn.Module):
    """``W + B A`` for each expert, as PEFT's ``target_parameters`` parametrizes a tensor."""

    def __init__(self, weight):
        super().__init__()
        experts, rows, columns = weight.shape
        self.a = torch.nn.Parameter(torch.randn(experts, 2, columns) / 4)
        self.b = torch.nn.Parameter(torch.randn(experts, rows, 2) / 4)

    def forward(self, weight):
        return weight + self.b @ self.a


@field_report("A19")
@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
def test_a_parametrized_weight_takes_effect_trains_and_goes_away(name):
    layer, x, topk = make_layer(), make_input(7), make_topk(7)
    plain = layer(x, topk).detach()
    adapter = LowRank(getattr(layer, name))
    parametrize.register_parametrization(layer, name, adapter)
    out = layer(x, topk)
    assert_right(layer, x, topk)
    assert (out - plain).abs().max() > 0.01
    out.sum().backward()
    assert adapter.a.grad.any() and adapter.b.grad.any()
    with torch.no_grad():
        adapter.b.mul_(2.0)  # an optimizer's step
    assert_right(layer, x, topk)
    parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    assert torch.equal(layer(x, topk), plain)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("called", [True, False])
def test_copies_compute_with_their_own_weights(again, called):
    layer, x, topk = make_layer(), make_input(7), make_topk(7)
    if called:
        layer(x, topk)
    twin = again(layer)
    assert twin._bound is None  # a runner need not be picklable
    assert torch.equal(twin(x, topk), layer(x, topk))
    with torch.no_grad():
        twin.w2_weight.mul_(2.0)
    assert torch.equal(twin(x, topk), 2 * layer(x, topk))


@field_report("A23")
def test_a_layer_from_the_meta_device():
    built, x, topk = make_layer(), make_input(7), make_topk(7)
    with torch.device("meta"):
        weights = make_weights(device="meta")
    layer = FusedMoE.from_w13_w2(weights.up, weights.down)
    with pytest.raises(ValueError, match=r"device meta; give the module memory with \.to_empty"):
        layer(x, topk)
    layer.to_empty(device="cpu")
    layer.load_state_dict(built.state_dict(), strict=True)
    assert torch.equal(layer(x, topk), built(x, topk))


@field_report("A14")
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_autocast_and_two_dtypes(dtype):
    layer, x, topk = make_layer(dtype=dtype), make_input(7), make_topk(7)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, topk)
        assert out.dtype == dtype
        assert_close(out, layer.expert_weights(), x.to(dtype), topk, None)
        if dtype == BF16:
            with pytest.raises(TypeError, match=r"expected bfloat16 like .*, got float32"):
                layer(x, topk)


def lying(**kwargs):
    return PreparedMoE(FakeRunner([], **kwargs), fake_config())


def test_a_runner_that_lies_about_its_input_is_caught(monkeypatch):
    x, topk = make_input(6), make_topk(6, absent=0)
    lying(does=True)(x.clone(), topk)  # not looked for
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_MUTATION", "1")
    x[2:] = 0  # unchanged by a multiplication
    text = "runner 'fake': declares mutates_input = False and changed 2 of 6 rows"
    for defer in (True, False):
        with pytest.raises(RuntimeError, match=text):
            lying(does=True)(x.clone(), topk, defer=defer)
    x[0] = float("nan")
    lying()(x, topk)
    lying(says=True, does=True)(x, topk)
    lying()(x.to(BF16)[:, ::2], topk)
    lying()(x[:0], make_topk(0))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"w13_bias": torch.zeros(2, 4)}, ValueError, r"up_bias: expected \(2, 8\), got \(2, 4\)"),
        ({"w2_bias": torch.zeros(3, 4)}, ValueError, r"down_bias: expected \(2, 4\), got \(3, 4\)"),
        ({"w2": torch.zeros(2, 4, 4).bfloat16()}, TypeError, "one floating dtype, got .*float32"),
        ({"w2": torch.zeros(2, 4, 4).int()}, TypeError, "one floating dtype, got .*int32"),
    ],
)
def test_what_broadcast_or_a_cast_would_let_pass(options, error, text):
    with pytest.raises(error, match=text):
        FusedMoE.from_w13_w2(torch.zeros(2, 8, 4), **{"w2": torch.zeros(2, 4, 4), **options})


@field_report("A14")
@pytest.mark.parametrize("runner", RUNNERS)
def test_hidden_states_of_another_dtype_are_refused_by_name(runner):
    layer, topk = make_layer(runner=runner), make_topk(2)
    with pytest.raises(TypeError, match=r"hidden_states: expected float32 like .*, got bfloat16"):
        layer(make_input(2, dtype=BF16), topk)
