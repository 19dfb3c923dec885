# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 experts with a scale a row: every step, and the whole, against float64."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput, finalize_output
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.runners import create_runner, expert_gemms
from sgl_moe_jit.moe.topk import StandardTopKOutput
from sgl_moe_jit.ops.scaled_grouped_mm import why_unavailable
from tests.moe.fp8_cases import (
    BF16_ROUNDING,
    accumulation,
    assert_like_the_model,
    exact_product,
    install_emulation,
    make_fp8_weights,
    model_oracle,
    model_quantize,
)
from tests.moe.runner_cases import BF16, DEVICES, NUM_EXPERTS, make_input, make_topk

on_devices = pytest.mark.parametrize("device", DEVICES)
both_runners = pytest.mark.parametrize("name", ["native", "grouped_mm"])


@pytest.fixture(autouse=True)
def _torch_gemm(request, monkeypatch):
    """torch's own on a GPU that has it; the emulation on a CPU."""
    if request.node.get_closest_marker("gpu"):
        why = why_unavailable(torch.device("cuda", 0))
        if why:
            pytest.skip(why)
    else:
        install_emulation(monkeypatch)


def case(num_tokens=9, hidden=64, width=32, factor=1.0, device="cpu", **options):
    weights = make_fp8_weights(hidden=hidden, width=width, device=device, **options)
    x = make_input(num_tokens, hidden, dtype=BF16, device=device)
    return weights, x, make_topk(num_tokens, factor=factor, device=device)


def assert_within(got, want, allowed, what):
    error = (got.double() - want).abs()
    bad = ~(error <= allowed)  # NaN is bad
    worst = int((error / allowed).nan_to_num(float("inf")).argmax()) if bad.any() else 0
    assert not bad.any(), (
        f"{what} {tuple(got.shape)}: {int(bad.sum())} of {got.numel()} beyond; worst at flat "
        f"{worst}: got {got.reshape(-1)[worst]}, expected {want.reshape(-1)[worst]}, allowed "
        f"{allowed.reshape(-1)[worst]:.3g}"
    )


@pytest.fixture
def gemm_calls(monkeypatch):
    """Operands and result of each grouped GEMM."""
    calls, real = [], expert_gemms.scaled_grouped_mm

    def record(*operands):
        out = real(*operands)
        calls.append((*operands, out))
        return out

    monkeypatch.setattr(expert_gemms, "scaled_grouped_mm", record)
    return calls


def deepseek_v3(device):
    """8 experts of DeepSeek-V3's size and 40 tokens of 4 each; experts 0 and 7 get none."""
    weights = make_fp8_weights(num_experts=8, hidden=7168, width=2048, device=device)
    x = make_input(40, 7168, dtype=BF16, device=device)
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(40, 6, generator=generator).argsort(1)[:, :4] + 1
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    routing = torch.rand(ids.shape, generator=generator)
    return weights, x, StandardTopKOutput(routing.to(device), ids.to(device), 2.5)


SMALL = [(9, 64, 32), (33, 256, 112)]


@pytest.mark.parametrize(
    ("device", "size"),
    [("cpu", size) for size in SMALL]
    + [pytest.param("cuda", size, marks=pytest.mark.gpu) for size in (*SMALL, "deepseek-v3")],
)
@pytest.mark.parametrize("bias", [False, True])
def test_every_step(device, size, bias, gemm_calls):
    """Each step from what the step before it really gave, so that each bound is a tight one."""
    if size == "deepseek-v3":
        weights, x, topk = deepseek_v3(device)
        assert not bias or pytest.skip("biases are tested at the other sizes")
    else:
        weights, x, topk = case(*size, factor=2.5, device=device, bias=bias, norm=bias)
    output = create_runner("grouped_mm", weights).run(x, topk, defer=True)
    (x1, _, s1, _, offsets, up_out), (x2, _, s2, _, _, down_out) = gemm_calls
    x1, x2 = x1.double(), x2.double()
    row_of = output.expanded_idx_to_permuted_idx.long()
    present = row_of >= 0
    expected = (topk.topk_ids >= 0) & (topk.topk_ids < weights.num_experts)
    assert torch.equal(present, expected) and present.any() and not present.all()
    token, _ = present.nonzero(as_tuple=True)
    rows, experts = row_of[present], topk.topk_ids[present]
    # 1. Rows are the tokens', quantized; offsets count them.
    values, scales = model_quantize(x)
    assert torch.equal(x1[rows], values[token])
    assert torch.equal(s1[rows].double(), scales[token])
    counts = torch.bincount(experts, minlength=weights.num_experts)
    assert torch.equal(counts.cumsum(0).int(), offsets) and (counts == 0).any()
    # 2. to 5. Expert by expert.
    up, down = weights.up_as_input_major(), weights.down_as_input_major()
    eps = BF16_ROUNDING
    for expert in range(weights.num_experts):
        mine = rows[experts == expert]
        product, size = exact_product(
            x1[mine], s1[mine], up[expert], weights.up_scale_by_row()[expert]
        )
        allowed = accumulation(x.shape[1], device) * size + eps * product.abs()
        assert_within(up_out[mine], product, allowed, f"first GEMM, expert {expert}")
        first = up_out[mine].double()
        if bias:
            first = (up_out[mine] + weights.up_bias[expert]).double()
        gate, up_half = first.chunk(2, -1)
        hidden = gate * torch.sigmoid(gate) * up_half
        # To bfloat16, then to e4m3: 3 bits of mantissa, subnormal below 2^-6; the scale follows
        # the largest element, which bfloat16 has moved.
        got = x2[mine] * s2[mine].double()[:, None]
        allowed = (2.0**-4 + 2 * eps) * hidden.abs() + 2.0**-10 * 1.01 * s2[mine].double()[:, None]
        assert_within(got, hidden, allowed, f"activations, expert {expert}")
        largest = hidden.abs().amax(-1) / 448
        assert_within(s2[mine], largest, 1.01 * eps * largest, f"their scales, expert {expert}")
        product, size = exact_product(
            x2[mine], s2[mine], down[expert], weights.down_scale_by_row()[expert]
        )
        allowed = accumulation(hidden.shape[1], device) * size + eps * product.abs()
        assert_within(down_out[mine], product, allowed, f"second GEMM, expert {expert}")
    # 6. The sum, of the rows that were handed over.
    if not bias:
        assert output.gemm2_out is down_out
    total = torch.zeros(x.shape, dtype=torch.float64, device=device)
    terms = topk.topk_weights[present].double()[:, None] * output.gemm2_out[rows].double()
    total.index_add_(0, token, terms * 2.5)
    spread = torch.zeros_like(total).index_add_(0, token, terms.abs() * 2.5)
    allowed = eps * total.abs() + (topk.topk_ids.shape[1] + 1) * 2.0**-24 * spread
    assert_within(output.finalize(), total, allowed, "finalize")


@on_devices
@both_runners
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("defer", [False, True])
def test_the_whole_against_the_model(device, name, bias, defer):
    """Also native, which has to agree on what is rounded where."""
    weights, x, topk = case(12, 128, 64, factor=2.5, device=device, bias=bias)
    got = create_runner(name, weights).run(x, topk, defer=defer)
    assert isinstance(got, DeferredFinalizeOutput) == defer
    got = finalize_output(got)
    assert got.dtype == BF16
    assert_like_the_model(got, weights, x, topk, what=name)


@on_devices
def test_activations_are_quantized_and_not_only_weights(device):
    """Both runners are nearer to the model than to dequantized experts in float64."""
    weights, x, topk = case(32, 256, 128, device=device)
    want, _, _ = model_oracle(weights, x, topk)
    wide = replace(weights.dequantized(torch.float64), is_silu_and_mul=False)
    unquantized = create_runner("native", wide).run(x.double(), topk, defer=False)
    away = (unquantized - want).square().mean().sqrt()
    assert away > 0.01 * want.square().mean().sqrt()
    for name in ("native", "grouped_mm"):
        got = create_runner(name, weights).run(x, topk, defer=False).double()
        assert (got - want).square().mean().sqrt() < away / 2, name


@on_devices
def test_deferred_and_finished_are_the_same_bits(device):
    weights, x, topk = case(16, factor=2.5, device=device, bias=True)
    runner = create_runner("grouped_mm", weights)
    assert torch.equal(runner.run(x, topk, defer=True).finalize(), runner.run(x, topk, defer=False))


@on_devices
@both_runners
@pytest.mark.parametrize("defer", [True, False])
def test_no_tokens_and_no_experts(device, name, defer):
    weights, x, topk = case(5, device=device, bias=True)
    runner = create_runner(name, weights)
    none = StandardTopKOutput(topk.topk_weights[:0], topk.topk_ids[:0])
    got = finalize_output(runner.run(x[:0], none, defer=defer))
    assert got.shape == (0, 64) and got.dtype == BF16
    for absent in (-1, NUM_EXPERTS, 2**30):
        gone = replace(topk, topk_ids=torch.full_like(topk.topk_ids, absent))
        got = finalize_output(runner.run(x, gone, defer=defer), x)
        assert torch.equal(got, x)


@on_devices
@both_runners
def test_a_token_that_is_not_finite_disturbs_no_other(device, name):
    weights, x, topk = case(9, device=device)
    topk = replace(topk, topk_ids=topk.topk_ids.clamp(1, 5))
    runner = create_runner(name, weights)
    clean = runner.run(x, topk, defer=False)
    dirty = x.clone()
    dirty[3, 7], dirty[6, 0] = float("nan"), float("inf")
    got = runner.run(dirty, topk, defer=False)
    others = torch.tensor([t not in (3, 6) for t in range(9)], device=device)
    assert torch.equal(got[others], clean[others]) and got[~others].isnan().all()


@on_devices
@both_runners
def test_slices_sum_to_the_whole(device, name):
    weights, x, topk = case(16, 64, 32, device=device)
    total = torch.zeros_like(x, dtype=torch.float32)
    for first in (0, NUM_EXPERTS // 2):
        mine = slice(first, first + NUM_EXPERTS // 2)
        part = FusedMoE.from_w13_w2(
            weights.up[mine],
            weights.down[mine],
            w13_scale=weights.up_scale[mine],
            w2_scale=weights.down_scale[mine],
            expert_range=(first, NUM_EXPERTS // 2),
            runner=name,
        )
        got = part(x, topk)
        assert got.any()
        total += got
    assert_like_the_model(total, weights, x, topk, what="sum of two slices")


@pytest.mark.gpu
def test_capture_and_replay():
    weights, x, topk = case(16, 256, 128, device="cuda")
    layer = FusedMoE(weights, runner="grouped_mm")
    for _ in range(2):
        layer(x, topk)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, topk)
    changed, other = x.flip(0).clone(), make_topk(16, seed=9, device="cuda")
    for _ in range(2):
        x.copy_(changed)
        topk.topk_ids.copy_(other.topk_ids)
        topk.topk_weights.copy_(other.topk_weights)
        graph.replay()
        assert torch.equal(y, layer(x, topk))
    before = y.clone()
    with torch.no_grad():
        layer.down_proj_scale.mul_(2.0)  # in place: the replay sees it
    graph.replay()
    assert torch.equal(y, layer(x, topk)) and torch.equal(y, before * 2)


@pytest.mark.parametrize("bias", [False, True])
def test_compile_fullgraph(bias):
    torch._dynamo.reset()
    weights, _, _ = case(bias=bias)
    runner = create_runner("grouped_mm", weights)

    def layer(x, ids, w):
        return runner.run(x, StandardTopKOutput(w, ids, 2.5), defer=True).finalize(x)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (5, 9, 0):
        x, topk = make_input(num_tokens, 64, dtype=BF16), make_topk(num_tokens)
        args = (x, topk.topk_ids, topk.topk_weights)
        assert torch.equal(compiled(*args), layer(*args))


def test_the_op():
    from tests.moe.fp8_cases import E4M3

    x, weight = torch.randn(6, 32).to(E4M3), torch.randn(3, 16, 32).to(E4M3).transpose(1, 2)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    args = (x, weight, torch.rand(6), torch.rand(3, 16), offsets)
    # Its schema test multiplies the inputs, which torch cannot do in float8.
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    op = torch.ops.sgl_moe_jit.scaled_grouped_mm.default
    torch.library.opcheck(op, args, test_utils=tests)
