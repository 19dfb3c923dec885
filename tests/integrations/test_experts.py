# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The experts implementation on its own: every flag, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations import transformers as integration
from sgl_moe_jit.integrations.transformers import experts as experts_module
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, deferred_finalize_context

from .tiny_models import assert_close, last_block, let_runners_overwrite

OURS = integration.EXPERTS_IMPLEMENTATION
E, K, T = 4, 2, 9
HAS_NORM_FLAG = "has_post_expert_norm" in experts_module._DECLARED


def make(hidden=64, width=32, implementation=OURS, own_gate=False, act=None, **flags):
    """An experts module with these flags; every parameter random."""
    gate, transposed = flags.get("has_gate", True), flags.get("is_transposed", False)
    up_width = 2 * width if gate else width
    first = "gate_up_proj" if gate else "up_proj"

    def parameter(*shape):
        return torch.nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)

    class ThirdPartyExperts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = E
            matrix = (hidden, up_width) if transposed else (up_width, hidden)
            setattr(self, first, parameter(E, *matrix))
            matrix = (width, hidden) if transposed else (hidden, width)
            self.down_proj = parameter(E, *matrix)
            if flags.get("has_bias"):
                setattr(self, f"{first}_bias", parameter(E, up_width))
                self.down_proj_bias = parameter(E, hidden)
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = torch.nn.LayerNorm(hidden)
            self.act_fn = act or torch.nn.SiLU()

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return "stock"

    if own_gate:

        def _apply_gate(self, gate_up):
            self.gate_calls = getattr(self, "gate_calls", 0) + 1
            return (gate_up[..., 1::2] + 1) * torch.sigmoid(gate_up[..., ::2])

        ThirdPartyExperts._apply_gate = _apply_gate
    cls = use_experts_implementation(**flags)(ThirdPartyExperts)
    config = transformers.PretrainedConfig()
    config._experts_implementation = implementation
    return cls(config)


def routing(num_experts=E):
    ids = torch.stack([torch.randperm(num_experts)[:K] for _ in range(T)])
    return ids, torch.rand(T, K)


def by_hand(m, x, ids, weights):
    """Float64, one expert a slot, straight from the definition of the flags."""
    first = "gate_up_proj" if m.has_gate else "up_proj"
    out = torch.zeros_like(x, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e >= m.num_experts:
                continue
            up, down = getattr(m, first)[e].double(), m.down_proj[e].double()
            if not m.is_transposed:
                up, down = up.T, down.T
            h = x[t].double() @ up
            if m.has_bias:
                h = h + getattr(m, f"{first}_bias")[e].double()
            if not m.has_gate:
                h = torch.nn.functional.silu(h)
            elif m.is_concatenated:
                half = h.shape[0] // 2
                h = torch.nn.functional.silu(h[:half]) * h[half:]
            else:
                h = (h[1::2] + 1) * torch.sigmoid(h[::2])
            y = h @ down
            if m.has_bias:
                y = y + m.down_proj_bias[e].double()
            if getattr(m, "has_post_expert_norm", False):
                y = torch.nn.functional.layer_norm(y, y.shape)
            out[t] += weights[t, k].double() * y
    return out


FLAG_CASES = [
    {"is_transposed": transposed, "is_concatenated": concatenated, **extra}
    for transposed in (False, True)
    for concatenated in (True, False)
    for extra in ({}, {"has_bias": True})
] + [
    {"has_gate": False},
    {"has_gate": False, "is_transposed": True, "has_bias": True},
    *([{"has_post_expert_norm": True}] if HAS_NORM_FLAG else []),
]


@pytest.mark.field_report("A12")
@pytest.mark.field_report("A25")
@pytest.mark.parametrize("hidden, width", [(64, 32), (64, 64)])  # 2I == H; I == H
@pytest.mark.parametrize("flags", FLAG_CASES, ids=lambda f: "-".join(k for k in f if f[k]) or "no")
@pytest.mark.parametrize("runner", ["auto", "native"])
@torch.no_grad()
def test_layout_comes_from_the_flags_alone(runner, flags, hidden, width, monkeypatch):
    create = experts_module.create_runner
    monkeypatch.setattr(experts_module, "create_runner", lambda _, weights: create(runner, weights))
    m = make(hidden, width, own_gate=not flags.get("is_concatenated", True), **flags)
    x, (ids, weights) = torch.randn(T, hidden), routing()
    expected = by_hand(m, x, ids, weights).float()
    assert_close(m(x, ids, weights), expected, hidden + width + K + 6, str(flags))
    handle = m(x, ids, weights, defer=True)
    assert isinstance(handle, DeferredFinalizeOutput)
    assert_close(handle.finalize(), expected, hidden + width + K + 6, f"{flags}, deferred")


@pytest.mark.field_report("A12")
@pytest.mark.field_report("A25")
@pytest.mark.parametrize("value", ["missing", None, 1, "yes"])
@pytest.mark.parametrize("flag", ["has_gate", "has_bias", "is_transposed", "is_concatenated"])
def test_a_missing_or_odd_flag_is_an_error(flag, value):
    m = make()
    delattr(m, flag) if value == "missing" else setattr(m, flag, value)
    with pytest.raises(UnsupportedError, match=rf"ThirdPartyExperts\.{flag}: expected True or"):
        m(torch.randn(T, 64), *routing())


@pytest.mark.field_report("A25")
@pytest.mark.parametrize(
    "name, change",
    [
        ("is_concatenated", lambda m: setattr(m, "is_concatenated", False)),  # the default gate
        ("gate_up_proj_bias", lambda m: setattr(m, "has_bias", True)),
        ("post_expert_norm", lambda m: setattr(m, "has_post_expert_norm", True)),
        ("up_proj", lambda m: setattr(m, "has_gate", False)),
        ("num_experts", lambda m: setattr(m, "num_experts", E - 1)),
        (
            "gate_up_proj",
            lambda m: setattr(m.gate_up_proj, "data", m.gate_up_proj.data.to(torch.float8_e4m3fn)),
        ),
        ("down_proj", lambda m: delattr(m, "down_proj")),
    ],
)
def test_flags_that_contradict_the_module_are_an_error(name, change):
    m = make()
    change(m)
    with pytest.raises(UnsupportedError, match=rf"ThirdPartyExperts\.{name}: expected .*, got"):
        m(torch.randn(T, 64), *routing())


@pytest.mark.field_report("A25")
def test_a_flag_of_a_later_version_may_only_have_its_default(monkeypatch):
    monkeypatch.setitem(experts_module._UNKNOWN, "has_pre_norm", False)
    m, x, route = make(), torch.randn(T, 64), routing()
    m(x, *route)
    m.has_pre_norm = True
    with pytest.raises(UnsupportedError, match=r"has_pre_norm: expected False, .*got True"):
        m(x, *route)


def test_the_installed_version_has_no_flag_that_we_do_not_know():
    assert experts_module._UNKNOWN == {}


def test_a_gate_of_the_models_own_is_called():
    m = make(is_concatenated=False, own_gate=True)
    m(torch.randn(T, 64), *routing())
    assert m.gate_calls > 0
    assert not experts_module.expert_weights(m).is_silu_and_mul


@pytest.mark.parametrize(
    "expected, make_one",
    [
        (True, lambda: make()),
        (True, lambda: make(act=transformers.activations.SiLUActivation())),
        (False, lambda: make(act=torch.nn.GELU())),
        (False, lambda: make(own_gate=True)),
        (False, lambda: make(has_gate=False)),
        (False, lambda: make(act=type("Mine", (torch.nn.SiLU,), {})())),
    ],
)
def test_silu_and_mul_only_when_it_is_exactly_that(expected, make_one):
    assert experts_module.expert_weights(make_one()).is_silu_and_mul is expected


def test_silu_with_a_hook_or_patch_is_not_replaced():
    m = make()
    m.act_fn.register_forward_hook(lambda *args: None)
    assert not experts_module.expert_weights(m).is_silu_and_mul
    m = make()
    m._apply_gate = lambda x: x
    assert not experts_module.expert_weights(m).is_silu_and_mul


@pytest.mark.field_report("A25")
@torch.no_grad()
def test_sentinel_ids_of_expert_parallelism_are_skipped():
    m, x, (ids, weights) = make(), torch.randn(T, 64), routing()
    m._is_expert_parallel = True
    ids[::2, 0] = E
    ids[4] = E  # a token with no expert here
    weights[ids == E] = 0
    expected = by_hand(m, x, ids, weights).float()
    for got in (m(x, ids, weights), m(x, ids, weights, defer=True).finalize()):
        assert_close(got, expected, 64 + 32 + K + 6, "sentinels")
        assert not got[4].any()


@pytest.mark.field_report("A25")
def test_a_bare_module_keeps_its_own_forward():
    m = make(implementation=None)
    assert m(torch.randn(T, 64), *routing()) == "stock"


def test_register_again_changes_nothing():
    before = dict(ALL_EXPERTS_FUNCTIONS.items())
    integration.register()
    assert dict(ALL_EXPERTS_FUNCTIONS.items()) == before
    assert ALL_EXPERTS_FUNCTIONS[OURS] is experts_module.experts_forward


def test_a_users_context_hands_no_stock_block_a_handle():
    m, x, route = make(), torch.randn(T, 64), routing()
    with deferred_finalize_context():
        assert isinstance(m(x, *route), torch.Tensor)
        assert isinstance(m(x, *route, defer=None), DeferredFinalizeOutput)
    assert isinstance(m(x, *route, defer=None), torch.Tensor)


@pytest.mark.parametrize("how", ["copy_", "data", "load_state_dict", "assign", "to"])
@torch.no_grad()
def test_a_changed_weight_is_seen_by_the_next_call(how):
    m, other, x, route = make(), make(), torch.randn(T, 64), routing()
    m(x, *route)
    if how == "copy_":
        for mine, theirs in zip(m.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    elif how == "data":
        for mine, theirs in zip(m.parameters(), other.parameters(), strict=True):
            mine.data = theirs.clone()
    elif how == "to":
        m.load_state_dict(other.state_dict())
        m.to(torch.bfloat16).to(torch.float32)
        other.to(torch.bfloat16)
        assert other(x.bfloat16(), *route).dtype == torch.bfloat16
        other.to(torch.float32)
    else:
        m.load_state_dict(other.state_dict(), assign=how == "assign")
    assert torch.equal(m(x, *route), other(x, *route))


@pytest.mark.field_report("A26")
@torch.no_grad()
def test_a_runner_that_overwrites_its_input_gets_a_copy(monkeypatch):
    m, x, route = make(), torch.randn(T, 64), routing()
    stock, before = m(x, *route), x.clone()
    inputs = let_runners_overwrite(monkeypatch)
    assert torch.equal(m(x, *route), stock)
    assert torch.equal(x, before) and inputs[0].isnan().all()


@torch.no_grad()
def test_output_dtype_is_the_inputs_under_autocast():
    m, x, route = make(), torch.randn(T, 64), routing()
    stock = m(x, *route)
    with torch.autocast("cpu", torch.bfloat16):
        got = m(x, *route)
    assert got.dtype == torch.float32
    # five bfloat16 roundings on the way: input, weights, both products, activation
    assert (got - stock).abs().max() <= 5 * 2**-8 * stock.abs().max()


def test_no_tokens():
    out = make()(torch.randn(0, 64), torch.empty(0, K, dtype=torch.int64), torch.empty(0, K))
    assert out.shape == (0, 64)


def test_gpt_oss_is_taken_by_its_own_gate_and_flags():
    m = last_block("gpt_oss").experts
    weights = experts_module.expert_weights(m)
    assert weights.is_transposed and weights.up_bias is m.gate_up_proj_bias
    assert weights.activation.__func__ is type(m)._apply_gate
    assert not weights.is_silu_and_mul
