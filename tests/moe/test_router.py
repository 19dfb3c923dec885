# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The router module: what stays float32, devices, saving and loading, one gate for all paths."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe import router as router_module
from sgl_moe_jit.moe import routing
from sgl_moe_jit.moe.router import Router
from tests.moe.routing_cases import CONFIGS, E, config
from tests.moe.routing_oracle import best, sigmoid
from tests.moe.runner_cases import DEVICES

field_report = pytest.mark.field_report
on_devices = pytest.mark.parametrize("device", DEVICES)
HIDDEN = 48
BF16 = torch.bfloat16
# GLM-5.2's biases lie here. In bfloat16 nine values are left of them.
BIASES = torch.linspace(6.817, 7.063, 256)
V3 = config(
    num_experts=256,
    top_k=8,
    score_function="sigmoid",
    has_correction_bias=True,
    renormalize=True,
    renormalize_epsilon=1e-20,
    routed_scaling_factor=2.5,
)


def make(routing=V3, **others):
    router = Router(routing, HIDDEN, **others)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.copy_(BIASES[: routing.num_experts])
    return router


def saved_and_loaded(router):
    buffer = io.BytesIO()
    torch.save(router.to(BF16).state_dict(), buffer)
    buffer.seek(0)
    other = Router(V3, HIDDEN, dtype=BF16)
    other.load_state_dict(torch.load(buffer))
    return other


def built_under_bf16(router):
    torch.set_default_dtype(BF16)
    try:
        other = Router(V3, HIDDEN)
    finally:
        torch.set_default_dtype(torch.float32)
    other.load_state_dict(router.state_dict())
    return other


def from_meta(router):
    with torch.device("meta"):
        other = Router(V3, HIDDEN)
    other = other.to(BF16).to_empty(device="cpu")
    other.load_state_dict(router.state_dict(), strict=True)
    return other


def assigned(router):
    other = Router(V3, HIDDEN)
    other.load_state_dict(copy.deepcopy(router.state_dict()), assign=True)
    return other


CONVERSIONS = {
    "to_bfloat16": lambda r: r.to(BF16),
    "half": lambda r: r.half(),
    "double": lambda r: r.double(),
    "bfloat16": lambda r: r.bfloat16(),
    "parent": lambda r: torch.nn.Sequential(r).to(BF16)[0],
    "to_and_back": lambda r: r.to(BF16).float(),
    "deepcopy": lambda r: copy.deepcopy(r.half()),
    "pickle": lambda r: pickle.loads(pickle.dumps(r.half())),
    "save_and_load": saved_and_loaded,
    "default_dtype": built_under_bf16,
    "meta": from_meta,
    "assign": assigned,
}


@field_report("A2")
def test_what_a_checkpoint_has_rounded_is_widened_when_assigned():
    state = {name: x.to(BF16) for name, x in make().state_dict().items()}
    other = Router(V3, HIDDEN)
    other.load_state_dict(state, assign=True)
    assert other.e_score_correction_bias.dtype == other.weight.dtype == torch.float32
    assert torch.equal(other.e_score_correction_bias, BIASES.to(BF16).float())


@field_report("A2")
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_bias_and_gate_keep_their_bits(conversion):
    router = make()
    weight = router.weight.detach().clone()
    after = CONVERSIONS[conversion](router)
    assert after.e_score_correction_bias.dtype == after.weight.dtype == torch.float32
    assert torch.equal(after.e_score_correction_bias, BIASES)
    assert torch.equal(after.weight, weight)


@on_devices
@field_report("A2")
def test_the_bias_steers_with_all_its_bits(device):
    router = make().to(device).to(BF16)
    x = torch.randn(2000, HIDDEN, generator=torch.Generator().manual_seed(0)).to(BF16)
    with torch.no_grad():
        output = router(x.to(device))
        logits = x.double() @ router.weight.cpu().double().t()
    sets, rounded = 0, 0
    for t, row in enumerate(logits.tolist()):
        scores = [sigmoid(value) for value in row]
        got = set(output.topk_ids[t].tolist())
        choice = [s + b for s, b in zip(scores, BIASES.tolist(), strict=True)]
        sets += got != set(best(choice, 8))
        choice = [s + b for s, b in zip(scores, BIASES.to(BF16).tolist(), strict=True)]
        rounded += got != set(best(choice, 8))
    # A float32 sum near 7.5 has a step of 2^-21, so of 2000 rows of 256 experts one may tie; with
    # the logits of a CPU, as summed there, none does.
    assert sets <= (0 if device == "cpu" else 3)
    assert rounded > 500  # what the rounding of the bias would have cost


def test_a_bfloat16_bias_is_refused_not_widened():
    with pytest.raises(TypeError, match=r"correction_bias: expected float32, got torch\.bfloat16"):
        routing.select_experts(torch.zeros(1, 256), V3, BIASES.to(BF16))


def test_the_gate_of_other_families_is_converted():
    routing_config = replace(V3, logits_dtype="model")
    router = make(routing_config, bias=True, dtype=BF16)
    assert router.weight.dtype == router.bias.dtype == BF16
    assert router.e_score_correction_bias.dtype == torch.float32
    assert router.half().weight.dtype == torch.float16
    assert router.logits(torch.zeros(2, HIDDEN, dtype=torch.float16)).dtype == torch.float16


def test_names_are_those_of_the_checkpoints():
    assert set(make().state_dict()) == {"weight", "e_score_correction_bias"}
    full = make(replace(CONFIGS["softmax_expert_scale"], has_correction_bias=True), bias=True)
    names = {"weight", "bias", "e_score_correction_bias", "per_expert_scale"}
    assert set(full.state_dict()) == names


@field_report("A23")
def test_meta_then_load_is_the_direct_build():
    router = make()
    with torch.device("meta"):
        other = Router(V3, HIDDEN)
    assert other.e_score_correction_bias.is_meta and other.weight.is_meta
    other.to_empty(device="cpu").load_state_dict(router.state_dict(), strict=True)
    x = torch.randn(5, HIDDEN)
    assert torch.equal(router(x).topk_ids, other(x).topk_ids)
    assert torch.equal(router(x).topk_weights, other(x).topk_weights)
    assert not list(set(dict(router.named_buffers())) - set(router.state_dict()))


@field_report("A1")
def test_every_path_asks_the_one_gate(monkeypatch):
    router, x, calls = make(), torch.randn(3, 2, HIDDEN), []

    def gate(*arguments):
        calls.append(arguments)
        return routing.router_logits(*arguments)

    monkeypatch.setattr(router_module, "router_logits", gate)
    standard = router(x)
    bypassed = router.bypass(x)
    assert len(calls) == 2 and standard.topk_ids.shape == (6, 8)
    assert torch.equal(bypassed.router_logits, router.logits(x))
    assert torch.equal(bypassed.to_standard().topk_ids, standard.topk_ids)
    assert torch.equal(bypassed.to_standard().topk_weights, standard.topk_weights)


@on_devices
@field_report("A1")
def test_a_float32_gate_widens_before_the_gemm(device):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2000, HIDDEN, generator=generator).to(device, BF16)
    weight = torch.randn(256, HIDDEN, generator=generator).to(device, BF16)
    logits = routing.router_logits(x, weight, V3)
    expected = x.double() @ weight.double().t()
    tolerance = HIDDEN * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    assert logits.dtype == torch.float32
    assert bool(((logits.double() - expected).abs() <= tolerance).all())
    rounded = routing.router_logits(x, weight, replace(V3, logits_dtype="model"))
    assert rounded.dtype == BF16
    plain = replace(V3, has_correction_bias=False)
    sets = [
        routing.select_experts(values, plain).topk_ids.sort(-1).values
        for values in (logits, rounded)
    ]
    assert int((sets[0] != sets[1]).any(-1).sum()) > 50  # what the rounding would have cost


@on_devices
@field_report("A1")
@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_takes_no_bits_of_a_float32_gate(device, enabled):
    router = make().to(device)
    x = torch.randn(4, HIDDEN, device=device)
    with torch.autocast(device, BF16, enabled=enabled):
        logits = router.logits(x)
    assert logits.dtype == torch.float32 and torch.equal(logits, router.logits(x))


@on_devices
def test_autocast_rules_a_gate_of_the_models_dtype(device):
    router = make(replace(V3, logits_dtype="model")).to(device)
    with torch.autocast(device, BF16):
        assert router.logits(torch.randn(4, HIDDEN, device=device)).dtype == BF16


def test_gate_errors():
    weight, x = torch.zeros(E, HIDDEN, dtype=BF16), torch.zeros(2, HIDDEN)
    model = config(logits_dtype="model")
    with pytest.raises(TypeError, match=r"hidden_states: expected torch\.bfloat16 like gate_w"):
        routing.router_logits(x, weight, model)
    with pytest.raises(ValueError, match=r"gate_weight: expected \[64, 47\], got \(64, 48\)"):
        routing.router_logits(x[:, 1:], weight, model)
    with pytest.raises(ValueError, match=r"gate_bias: expected \[64\], got \(63,\)"):
        routing.router_logits(x.to(BF16), weight, model, torch.zeros(63))
    assert routing.router_logits(x, weight, config()).dtype == torch.float32


def test_gradients_reach_the_gate():
    router, x = make(), torch.randn(5, HIDDEN, requires_grad=True)
    router(x).topk_weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0 and x.grad.abs().sum() > 0


def test_repr_shows_the_routing():
    assert "score_function='sigmoid'" in repr(make())
