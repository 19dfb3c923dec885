# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 experts: weights, e4m3 in float64 by its definition, torch's GEMM for CPUs without it."""

import torch

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from tests.moe.runner_cases import BF16, HIDDEN, NUM_EXPERTS, WIDTH, RowNorm, silu_halves

E4M3 = torch.float8_e4m3fn
BF16_ROUNDING = 2.0**-8  # half a unit in the last of 8 bits, relative


def _e4m3_table():
    """Return every finite value >= 0 by its code: 4 exponent bits of bias 7, 3 of mantissa."""
    values = []
    for code in range(127):  # 127 is NaN; there is no infinity
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            values.append(mantissa * 2.0**-9)
        else:
            values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values, dtype=torch.float64)


TABLE = _e4m3_table()


def round_to_e4m3(x):
    """Round float64 to the nearest e4m3, ties to the even code. |x| up to 448."""
    table = TABLE.to(x.device)
    above = torch.searchsorted(table, x.abs()).clamp(1, 126)
    low, high = table[above - 1], table[above]
    down, up = x.abs() - low, high - x.abs()
    take_low = (down < up) | ((down == up) & ((above - 1) % 2 == 0))
    return torch.where(take_low, low, high) * torch.where(x < 0, -1.0, 1.0)


def model_quantize(x):
    """Return e4m3 values and scales of each row, in float64 with float32's roundings put in."""
    largest = x.double().abs().amax(-1)
    scales = (largest / 448).float().double().clamp(min=2.0**-126)
    return round_to_e4m3((x.double() / scales[:, None]).float().double()), scales


def make_fp8_weights(
    *,
    num_experts=NUM_EXPERTS,
    hidden=HIDDEN,
    width=WIDTH,
    device="cpu",
    is_transposed=False,
    bias=False,
    norm=False,
    checkpoint_scales=False,
):
    """Random experts. Scales differ by up to 16 from row to row: one misplaced cannot be missed."""
    generator = torch.Generator().manual_seed(11)

    def quantized(*shape):
        x = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        spread = 2.0 ** (torch.rand(shape[:-1], generator=generator) * 4 - 2)
        scale = x.abs().amax(-1) / 448
        values = (x / scale[..., None]).to(E4M3).to(device)
        scale = (scale * spread).to(device)
        if is_transposed:
            values = values.transpose(1, 2).contiguous()
        return values, scale[..., None] if checkpoint_scales else scale

    up, up_scale = quantized(num_experts, 2 * width, hidden)
    down, down_scale = quantized(num_experts, hidden, width)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device, BF16)

    return ExpertWeights(
        up,
        down,
        silu_halves,
        is_transposed=is_transposed,
        up_bias=random(num_experts, 2 * width) if bias else None,
        down_bias=random(num_experts, hidden) if bias else None,
        post_expert_norm=RowNorm(hidden, BF16, device) if norm else None,
        is_silu_and_mul=True,
        up_scale=up_scale,
        down_scale=down_scale,
    )


def emulated_scaled_grouped_mm(
    mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype, use_fast_accum
):
    """Do what torch's does on a CUDA device, with the checks it makes; unwritten rows are NaN."""
    by_row = torch.nn.functional.ScalingType.RowWise
    assert recipe_a is by_row and recipe_b is by_row and output_dtype == BF16
    assert not use_fast_accum
    assert mat_a.dtype == mat_b.dtype == E4M3 and mat_a.dim() == 2 and mat_b.dim() == 3
    assert mat_a.shape[1] == mat_b.shape[1]
    assert all(n % 16 == 0 for n in (*mat_a.shape[1:], *mat_b.shape[1:]))
    assert mat_a.stride(1) == 1 and mat_a.stride(0) % 16 == 0 and mat_a.stride(0) >= mat_a.shape[1]
    assert mat_b.stride(1) == 1 and mat_b.stride(2) % 16 == 0 and mat_b.stride(0) % 16 == 0
    assert mat_a.data_ptr() % 16 == 0 and mat_b.data_ptr() % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.shape == mat_a.shape[:1] and scale_a.is_contiguous()
    assert scale_b.shape == (mat_b.shape[0], mat_b.shape[2]) and scale_b.stride(1) == 1
    assert offs.dtype == torch.int32 and offs.shape == mat_b.shape[:1]
    out = torch.full((mat_a.shape[0], mat_b.shape[2]), float("nan"), dtype=BF16)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        total = mat_a[start:end].float() @ mat_b[expert].float()
        out[start:end] = total * scale_a[start:end, None] * scale_b[expert]
        start = end
    return out


def exact_product(x, x_scales, weight, weight_scales):
    """Return ``x @ weight`` with scales, and the same with every term by its magnitude, float64."""
    scales = x_scales.double()[:, None] * weight_scales.double()
    product = x.double() @ weight.double()
    return product * scales, (x.double().abs() @ weight.double().abs()) * scales


def accumulation(terms, device):
    """Return the relative error of a sum of ``terms`` products, of their magnitudes' sum.

    A CPU adds in float32. Hopper's unit cuts each product to 14 bits below the largest of its 32,
    and the result goes on in float32 every 128: worst where one product outweighs the others,
    which these inputs have not. Half a unit of those 14 bits: on an H200 with torch 2.11 the worst
    of 200 thousand sums came to half of that, and a factor of 2 amiss is a hundred times more.
    """
    return 2.0**-12 if torch.device(device).type == "cuda" else (terms + 4) * 2.0**-24


def model_oracle(weights, x, topk):
    """One slot at a time, with the quantization modelled: output, moves, and other errors.

    The second projection reads activations that were rounded to e4m3 after others had been rounded
    to bfloat16: one near a tie may go either way, a step of 1/8 or 1/16 of it. ``r`` is how far
    each may move. Moves are independent, so that the root of the sum of their squares bounds their
    standard deviation. Errors of other kinds are bounds, and add up.
    """
    up, down = weights.up_as_input_major().double(), weights.down_as_input_major().double()
    up_scale, down_scale = weights.up_scale_by_row().double(), weights.down_scale_by_row().double()
    factor = topk.routed_scaling_factor
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    variance, errors = torch.zeros_like(out), torch.zeros_like(out)
    eps = BF16_ROUNDING
    for token, k in (topk.topk_ids.ge(0) & topk.topk_ids.lt(len(up))).nonzero().tolist():
        expert = int(topk.topk_ids[token, k])
        values, scales = model_quantize(x[token : token + 1])
        first, magnitude = exact_product(values, scales, up[expert], up_scale[expert])
        first_error = accumulation(x.shape[1], x.device) * magnitude + eps * first.abs()
        if weights.up_bias is not None:
            first = first + weights.up_bias[expert].double()
            first_error = first_error + eps * first.abs()
        (gate, up_half), (e_gate, e_up) = first.chunk(2, -1), first_error.chunk(2, -1)
        silu = gate * torch.sigmoid(gate)
        hidden = silu * up_half
        # silu's slope is below 1.1; two roundings where the activation is torch's expression.
        e_hidden = (
            1.1 * e_gate * (up_half.abs() + e_up) + silu.abs() * e_up + 2 * eps * hidden.abs()
        )
        values, scales = model_quantize(hidden)
        r = _reach(hidden, e_hidden, values * scales[:, None])
        row, magnitude = exact_product(values, scales, down[expert], down_scale[expert])
        moves = (r.square() @ down[expert].square()) * down_scale[expert].square()
        error = accumulation(hidden.shape[1], x.device) * magnitude + eps * row.abs()
        if weights.down_bias is not None:
            row = row + weights.down_bias[expert].double()
            error = error + eps * row.abs()
        weight = topk.topk_weights[token, k].double() * factor
        out[token] += (weight * row)[0]
        variance[token] += (weight.square() * moves)[0]
        errors[token] += (weight.abs() * error)[0]
    return out, variance.sqrt(), errors + eps * out.abs()


def assert_like_the_model(got, weights, x, topk, *, factor=1.0, what=""):
    """Check each element within 6 standard deviations, and all together within one.

    The second is the sharp one: it is less than a tenth of the output's own size, where a scale
    of another row makes errors as large as the output.
    """
    want, moves, errors = model_oracle(weights, x, topk)
    want, moves, errors = factor * want, factor * moves, factor * errors
    error = (got.double() - want).abs()
    assert (error <= 6 * moves + errors).all(), f"{what}: {int((error > 6 * moves + errors).sum())}"

    def size(values):
        return float(values.square().mean().sqrt())

    bound = size(moves + errors)
    assert size(error) <= bound, f"{what}: rms error {size(error):.3g}, allowed {bound:.3g}"
    assert bound < 0.1 * size(want), f"{what}: a bound of {bound:.3g} for {size(want):.3g}"


def _reach(hidden, error, value):
    """Return how far a dequantized element may be from ``value`` if ``hidden`` is off by error."""
    low_scale = (hidden.abs() - error).amax(-1, keepdim=True) / 448
    high_scale = (hidden.abs() + error).amax(-1, keepdim=True) / 448
    reach = torch.zeros_like(hidden)
    for bound in (hidden - error, hidden + error):
        for scale in (low_scale, high_scale):
            moved = round_to_e4m3((bound / scale).clamp(-448, 448)) * scale
            reach = torch.maximum(reach, (moved - value).abs())
    return reach


def install_emulation(monkeypatch):
    """Let grouped_mm serve FP8 on a CPU."""
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", emulated_scaled_grouped_mm)
    monkeypatch.setattr("sgl_moe_jit.ops.scaled_grouped_mm.why_unavailable", lambda device: "")
