# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One shared MLP cut into expert slots: where each row goes, and that the slots sum up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ep import EpLayout, get_moe_weights
from sgl_moe_jit.moe.activation_kinds import SwiGluOai
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.shared_slots import SharedMlp, take_slots
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.moe.fp8_cases import make_fp8_weights
from tests.moe.runner_cases import HIDDEN, NUM_EXPERTS, WIDTH, make_input, make_weights, silu_halves

F64 = torch.float64


def shared_mlp(num_shared, dtype=F64, hidden=HIDDEN, width=WIDTH) -> SharedMlp:
    generator = torch.Generator().manual_seed(5)

    def random(rows, columns):
        return (torch.randn(rows, columns, generator=generator, dtype=F64) / 4).to(dtype)

    wide = num_shared * width
    return SharedMlp(random(wide, hidden), random(wide, hidden), random(hidden, wide))


def run(mlp: SharedMlp, x):
    """The whole MLP, written out."""
    gate, up = x @ mlp.gate.T, x @ mlp.up.T
    return (gate / (1 + (-gate).exp()) * up) @ mlp.down.T


@pytest.mark.parametrize("num_shared", [1, 2, 3])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_slots_sum_up_to_the_mlp(num_shared, is_transposed, bias):
    weights = make_weights(dtype=F64, is_transposed=is_transposed, bias=bias)
    mlp = shared_mlp(num_shared)
    slots = take_slots(weights, (4, 1, 4), mlp)
    assert slots.num_experts == 3 + num_shared
    for slot, expert in enumerate((4, 1, 4)):
        assert torch.equal(slots.up[slot], weights.up[expert])
        assert torch.equal(slots.down[slot], weights.down[expert])
        if bias:
            assert torch.equal(slots.up_bias[slot], weights.up_bias[expert])
            assert torch.equal(slots.down_bias[slot], weights.down_bias[expert])
    if bias:
        assert not slots.up_bias[3:].any() and not slots.down_bias[3:].any()
    x = make_input(7, dtype=F64)
    total = torch.zeros_like(x)
    up, down = slots.up_as_input_major(), slots.down_as_input_major()
    for slot in range(3, 3 + num_shared):
        total += silu_halves(x @ up[slot]) @ down[slot]
    want = run(mlp, x)
    # float64: two dot products of HIDDEN and of num_shared * WIDTH terms
    allowed = (HIDDEN + num_shared * WIDTH) * 2.0**-53 * 8 * want.abs().max()
    assert (total - want).abs().max() <= allowed
    # Columns of one slot alone are not the MLP: the sum is what counts.
    if num_shared > 1:
        alone = silu_halves(x @ up[3]) @ down[3]
        assert (alone - want).abs().max() > 0.1 * want.abs().max()


def test_slots_of_quantized_experts_keep_their_scales_and_take_no_shared_mlp():
    weights = make_fp8_weights()
    slots = take_slots(weights, (4, 1, 4, 0, 2, 3))
    wide, slots_wide = weights.dequantized(), slots.dequantized()
    for slot, expert in enumerate((4, 1, 4, 0, 2, 3)):
        assert torch.equal(slots_wide.up[slot], wide.up[expert])
        assert torch.equal(slots_wide.down[slot], wide.down[expert])
    with pytest.raises(ValueError, match=r"that are not quantized, got fp8_per_channel; keep the"):
        take_slots(weights, (0, 1), shared_mlp(1, torch.bfloat16))


def test_a_layer_runs_the_slots_with_equal_weights():
    weights, mlp = make_weights(dtype=F64), shared_mlp(2)
    layer = FusedMoE(take_slots(weights, (0, 1), mlp), num_fused_shared_experts=2, runner="native")
    assert "shared=2" in repr(layer)
    x = make_input(5, dtype=F64)
    ids = torch.tensor([[2, 3]]).expand(5, 2)
    got = layer(x, StandardTopKOutput(torch.ones(5, 2, dtype=F64), ids))
    want = run(mlp, x)
    # Weights and the sum of a token are float32 in every runner: one rounding a term.
    assert (got - want).abs().max() <= 4 * 2.0**-24 * 4 * want.abs().max()


def test_slots_are_copies_and_carry_no_gradient():
    weights = make_weights()
    up = torch.nn.Parameter(weights.up)
    before = up.detach().clone()
    slots = take_slots(replace(weights, up=up), range(NUM_EXPERTS))
    assert not slots.up.requires_grad and slots.up_bias is None
    slots.up.zero_()
    assert torch.equal(up, before)


def test_what_does_not_fit_is_refused():
    weights = make_weights(dtype=F64)
    for experts in ((), (NUM_EXPERTS,), (-1, 0)):
        with pytest.raises(ValueError, match="experts: expected some of 0 to 5"):
            take_slots(weights, experts)
    with pytest.raises(TypeError, match=r"shared gate: expected torch.float64 .* torch.float32"):
        take_slots(weights, (0,), shared_mlp(1, torch.float32))
    with pytest.raises(ValueError, match=f"multiple of the routed experts' {WIDTH}, got 24"):
        take_slots(weights, (0,), shared_mlp(1, width=24))
    with pytest.raises(ValueError, match=f"hidden size {HIDDEN}, got 64"):
        take_slots(weights, (0,), shared_mlp(1, hidden=64))
    mlp = shared_mlp(1)
    with pytest.raises(ValueError, match=r"expected \[S I, H\], \[S I, H\] and \[H, S I\]"):
        take_slots(weights, (0,), replace(mlp, down=mlp.gate))
    for other in (
        replace(weights, activation=SwiGluOai(), is_silu_and_mul=False),
        make_weights(dtype=F64, norm=True),
    ):
        with pytest.raises(ValueError, match="expected routed experts that are SwiGLU MLPs"):
            take_slots(other, (0,), mlp)


def test_the_number_of_shared_slots_is_checked():
    for count in (-1, NUM_EXPERTS + 1):
        with pytest.raises(ValueError, match="num_fused_shared_experts: expected 0 to 6"):
            FusedMoE(make_weights(), num_fused_shared_experts=count)


def test_a_block_does_not_count_fused_experts_twice():
    layer = FusedMoE(make_weights(), num_fused_shared_experts=1)
    with pytest.raises(ValueError, match=r"shared_is_fused: expected True.* hold 1 shared slots"):
        SharedExpertMoEBlock(torch.nn.Identity(), layer, torch.nn.Identity())
    SharedExpertMoEBlock(torch.nn.Identity(), layer, torch.nn.Identity(), shared_is_fused=True)


def test_a_balancer_sees_the_routed_slots_of_a_fused_layer():
    layout = EpLayout(6, 0, 2, 2)
    weights = make_weights(dtype=F64, bias=True)
    layer = FusedMoE(take_slots(weights, (3, 4, 5), shared_mlp(2)), num_fused_shared_experts=2)
    views = get_moe_weights(layer, layout)
    parameters = [layer.gate_up_proj, layer.down_proj]
    parameters += [layer.gate_up_proj_bias, layer.down_proj_bias]  # inside the experts: they move
    assert [v.data_ptr() for v in views] == [p.data_ptr() for p in parameters]
    kept = [p.detach()[3:].clone() for p in parameters]
    for view in views:
        assert view.shape[0] == 3
        view.copy_(view.flip(0).clone())
    assert all(torch.equal(p[3:], k) for p, k in zip(parameters, kept, strict=True))
    assert torch.equal(layer.gate_up_proj[0], weights.up[5])
