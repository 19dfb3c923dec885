# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Layers in FlashInfer's formats whose true weights are known, since they are chosen first.

Values are on the formats' grids and scales are powers of two, so that nothing is lost in storing
them, nor in quantizing the inputs made here.
"""

import functools
from dataclasses import dataclass, replace

import torch

from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.flashinfer_weights import FlashInferWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk import BypassedTopKOutput, StandardTopKOutput
from tests.moe.runner_cases import oracle

E, H, WIDTH, K, T = 4, 128, 128, 2, 5
BF16, F32 = torch.bfloat16, torch.float32
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRID = torch.cat([GRID, -GRID])  # e2m1 by code
INPUT_SCALE, INNER_SCALE = 2.0, 4.0  # of NVFP4: before the input's and the hidden quantization
FORMATS = [Quantization.NONE, Quantization.FP8_BLOCK, Quantization.NVFP4, Quantization.MXFP4]


def up_first(x):
    """FlashInfer's gated activation: up in front, gate behind."""
    up, gate = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@dataclass
class Layer:
    weights: FlashInferWeights
    plain: ExpertWeights  # the same parameters, float32, without padding


def _powers(generator, *shape):
    return 2.0 ** torch.randint(-2, 1, shape, generator=generator).float()


def _repeat(scale, rows, columns):
    return scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def _fp4(generator, rows, columns, block):
    """Return (packed, scale, values) of [E, rows, columns]."""
    codes = torch.randint(0, 16, (E, rows, columns), generator=generator)
    scale = _powers(generator, E, rows, columns // block)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    if block == 32:  # ue8m0: the exponent of a power of two, in a byte
        stored = (scale.log2() + 127).to(torch.uint8).view(torch.float8_e4m3fn)
    else:
        stored = scale.to(torch.float8_e4m3fn)
    return packed, stored, GRID[codes] * _repeat(scale, 1, block)


def _fp8(generator, rows, columns):
    values = torch.randint(-8, 9, (E, rows, columns), generator=generator) / 16
    scale = _powers(generator, E, rows // 128, columns // 128)
    return values.to(torch.float8_e4m3fn), scale, values * _repeat(scale, 128, 128)


def in_blocks(matrix, block):
    """[E, M, K] to [E, K / block, M, block]."""
    return matrix.unflatten(2, (-1, block)).transpose(1, 2).contiguous()


@functools.cache
def make_layer(quantization, /, *, padded_dim=H, block_major=False, **changes):
    generator = torch.Generator().manual_seed(5)
    fields = {}
    if quantization is Quantization.NONE:
        up = (torch.randn(E, 2 * WIDTH, padded_dim, generator=generator) / 12).to(BF16)
        down = (torch.randn(E, padded_dim, WIDTH, generator=generator) / 12).to(BF16)
        down[:, H:] = float("nan")  # rows of the padding: never read
        first, second = in_blocks(up, 64), in_blocks(down, 64)
    elif quantization is Quantization.FP8_BLOCK:
        first, scale1, up = _fp8(generator, 2 * WIDTH, padded_dim)
        second, scale2, down = _fp8(generator, padded_dim, WIDTH)
        fields = {"gemm1_weights_scale": scale1, "gemm2_weights_scale": scale2}
        if block_major:
            first, second = in_blocks(first, 128), in_blocks(second, 128)
    else:
        block = 16 if quantization is Quantization.NVFP4 else 32
        first, scale1, up = _fp4(generator, 2 * WIDTH, padded_dim, block)
        second, scale2, down = _fp4(generator, padded_dim, WIDTH, block)
        fields = {"gemm1_weights_scale": scale1, "gemm2_weights_scale": scale2}
        if quantization is Quantization.NVFP4:
            tensor1, tensor2 = _powers(generator, E) / 16, _powers(generator, E) / 32
            up, down = up * tensor1[:, None, None], down * tensor2[:, None, None]
            fields |= {
                "output1_scale_gate_scalar": tensor1 / INPUT_SCALE,
                "output1_scale_scalar": tensor1 / INPUT_SCALE * INNER_SCALE,
                "output2_scale_scalar": tensor2 / INNER_SCALE,
                "input_global_scale": torch.tensor([INPUT_SCALE]),
            }
    arguments = {
        "backend": "trtllm",
        "quantization": quantization,
        "hidden_dim": H,
        "intermediate_dim": WIDTH,
        "gemm1_weights": first,
        "gemm2_weights": second,
        **fields,
    }
    plain = ExpertWeights(
        up[:, :, :H].float(), down[:, :H].float(), up_first, is_silu_and_mul=False
    )
    return Layer(FlashInferWeights(**(arguments | changes)), plain)


def make_input(quantization, num_tokens=T):
    """[T, H] bfloat16 that survives the format's quantization of activations unharmed."""
    generator = torch.Generator().manual_seed(6)
    grid = torch.tensor([0, 0.5, 1, -1, 1.5, -2, 2, -0.5])
    x = grid[torch.randint(0, len(grid), (num_tokens, H), generator=generator)]
    x[:, ::16] = 7 if quantization is Quantization.FP8_BLOCK else 6  # the largest of each group
    return x.to(BF16)


def make_topk(num_tokens=T, *, factor=1.0, dtype=F32, absent=True):
    generator = torch.Generator().manual_seed(7)
    ids = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
    if absent and num_tokens >= 4:
        ids[0, 1], ids[2, 0], ids[3] = -1, E, torch.tensor([-1, 2**30])
    weights = torch.rand(num_tokens, K, generator=generator).to(dtype)
    return StandardTopKOutput(weights, ids, factor)


ROUTERS = {
    0: RouterConfig(16, 3, "softmax", routed_scaling_factor=2.5, scale_in_weights=False),
    1: RouterConfig(16, 3, "softmax", score_after_top_k=True),
    2: RouterConfig(
        16, 3, "sigmoid", has_correction_bias=True, n_group=4, topk_group=2, renormalize=True,
        renormalize_epsilon=1e-20, routed_scaling_factor=2.5,
    ),
    4: RouterConfig(16, 3, "softmax", renormalize=True, routed_scaling_factor=1.5),
    6: RouterConfig(16, 3, "sigmoid", renormalize=True),
    8: RouterConfig(16, 3, "sigmoid"),
}  # fmt: skip


def make_logits(config, num_tokens=T, dtype=F32):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(num_tokens, config.num_experts, generator=generator).to(dtype)
    bias = (
        torch.randn(config.num_experts, generator=generator) if config.has_correction_bias else None
    )
    return BypassedTopKOutput(logits, config, bias)


def local(standard, offset):
    """The router's choice as this rank sees it."""
    return replace(standard, topk_ids=standard.topk_ids - offset)


def assert_right(got, plain, x, topk, *, bf16_weights=False):
    """Against float64.

    Each expert row is rounded to bfloat16 (2^-8 of it), weights may be (2^-8 again), the sum is
    rounded once (2^-8); float32 in between: two dot products of 128 terms, 2^-16 bounds both.
    """
    want = oracle(plain, x, topk)
    terms = oracle(plain, x, topk, absolute=True)
    relative = 2.0**-8 * (2 if bf16_weights else 1) + 2.0**-16
    # A row that cancels was rounded after the cancelling; its dot products were not: 1e-3 of a
    # typical row covers them and is 1e3 times less than a row.
    allowed = relative * (terms + 1e-3 * terms.mean()) + 2.0**-8 * want.abs()
    error = (got.double() - want).abs()
    worst = int((error / allowed).argmax())
    assert (error <= allowed).all(), (
        f"{int((error > allowed).sum())} of {error.numel()} beyond; worst at {worst}: "
        f"got {got.flatten()[worst]}, expected {want.flatten()[worst]}, "
        f"allowed {allowed.flatten()[worst]}"
    )
