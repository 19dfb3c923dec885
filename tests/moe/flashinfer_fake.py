# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A FlashInfer in plain torch: real signatures, the documented answers, its versions' faults.

Weights are decoded from what is stored, rows are computed in float32 and rounded to bfloat16, each
expert's rows are padded to a tile, and rows that nobody refers to are NaN.
"""

import inspect
from dataclasses import dataclass, field

import torch

from sgl_moe_jit.moe.runners.flashinfer_abi import at_least
from sgl_moe_jit.moe.runners.flashinfer_functions import FlashInferFunctions
from sgl_moe_jit.moe.runners.flashinfer_trtllm import FlashInferTrtllmRunner
from sgl_moe_jit.ops import moe_finalize_fuse_shared
from tests.moe.flashinfer_cases import GRID, make_layer, up_first
from tests.moe.flashinfer_signatures import every_version

TILE = 8
BF16, F32 = torch.bfloat16, torch.float32


def decode_fp4(packed):
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    return GRID[codes]


def decode_scale(scale, block):
    if block == 32:
        return 2.0 ** (scale.view(torch.uint8).float() - 127)
    return scale.float()


def out_of_blocks(matrix):
    return matrix.float().transpose(1, 2).flatten(2) if matrix.dim() == 4 else matrix.float()


def decode_weights(a, function):
    """Return the two matrices in float32, [E, 2I, H_pad] and [E, H_pad, I]."""
    matrices = []
    for name in ("gemm1_weights", "gemm2_weights"):
        matrix, scale = a[name], a.get(f"{name}_scale")
        if "fp4" in function:
            values = decode_fp4(matrix)
            block = values.shape[-1] // scale.shape[-1]
            matrices.append(values * decode_scale(scale, block).repeat_interleave(block, -1))
        elif "fp8" in function:
            wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
            matrices.append(out_of_blocks(matrix) * wide)
        else:
            matrices.append(out_of_blocks(matrix))
    return matrices


def decode_input(a, function):
    x, scale = a["hidden_states"], a.get("hidden_states_scale")
    if scale is None:
        return x.float()
    if "fp8" in function:
        assert scale.shape == (x.shape[1] // 128, x.shape[0]) and scale.dtype == F32
        return x.float() * scale.t().repeat_interleave(128, 1)
    values = decode_fp4(x) if x.dtype == torch.uint8 else x.float()
    block = values.shape[1] // scale.shape[1]
    assert block == (16 if x.dtype == torch.uint8 else 32)
    return values * decode_scale(scale, block).repeat_interleave(block, 1)


def route(a):
    """FlashInfer's routing methods, from its documentation: weights and ids."""
    method, k = a["routing_method_type"], a["top_k"]
    logits = a["routing_logits"].double()
    factor = a["routed_scaling_factor"]
    if method == 1:
        values, ids = logits.topk(k)
        return values.softmax(-1), ids
    scores = logits.softmax(-1) if method in (0, 4) else logits.sigmoid()
    choice = scores
    if method == 2:
        choice = scores + a["routing_bias"].double()
        groups = choice.unflatten(1, (a["n_group"], -1))
        best = groups.topk(min(2, groups.shape[2])).values.sum(-1).topk(a["topk_group"]).indices
        closed = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
        choice = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    ids = choice.topk(k).indices
    weights = scores.gather(1, ids)
    if method in (2, 4, 6):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor if method == 2 and factor else weights, ids


@dataclass
class FakeFlashInfer:
    """One version. ``spoil`` gets the answer to ``do_finalize=False`` and returns another one."""

    version: str
    signatures: dict[str, inspect.Signature] = None
    spoil: object = None
    calls: list = field(default_factory=list)

    def __post_init__(self):
        known = every_version()
        self.signatures = self.signatures or known.get(self.version) or known["0.6.15"]

    def functions(self):
        return FlashInferFunctions(self.version, {n: self._function(n) for n in self.signatures})

    def _function(self, name):
        signature = self.signatures[name]

        def function(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            self.calls.append((name, dict(bound.arguments)))
            bound.apply_defaults()
            body = getattr(self, "_" + name, None) or self._trtllm
            return body(name, bound.arguments)

        function.__signature__ = signature
        return function

    def _fp4_quantize(self, name, a):
        assert a["is_sf_swizzled_layout"] is False and a["sf_vec_size"] == 16
        groups = (a["input"].float() * a["global_scale"]).unflatten(1, (-1, 16))
        scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        wide = scale.float().masked_fill(scale.float() == 0, 1)
        codes = (groups / wide[..., None]).unsqueeze(-1).sub(GRID).abs().argmin(-1).flatten(1)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return packed, scale.view(torch.uint8)

    def _mxfp8_quantize(self, name, a):
        assert a["is_sf_swizzled_layout"] is False
        groups = a["input"].float().unflatten(1, (-1, 32))
        exponent = (groups.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
        values = (groups / 2.0 ** exponent[..., None]).flatten(1).to(torch.float8_e4m3fn)
        return values, (exponent + 127).to(torch.uint8).flatten()

    def _routing(self, name, a):
        """Return weights as they come back, and ids among this rank's experts."""
        if "routed" not in name:
            weights, ids = route(a)
            weights = weights.to(BF16)
            fixed = "0.6.15" if "fp4" in name else "0.6.16"
            if a["routing_logits"].dtype == F32 and not at_least(self.version, fixed):
                weights = mislabel(weights)
            return weights, ids - a["local_expert_offset"]
        topk_ids = a["topk_ids"]
        if isinstance(topk_ids, tuple):
            ids, weights = topk_ids
            since = (
                {BF16: "0.6.15", F32: "0.6.16"}
                if "fp4" in name
                else dict.fromkeys((BF16, F32), "0.6.18")
            )
            assert at_least(self.version, since[weights.dtype]), "pair not taken"
        else:
            ids = topk_ids >> 16
            weights = (topk_ids & 0xFFFF).to(torch.int16).view(BF16)
        assert ids.dtype == torch.int32 and ids.is_contiguous() and weights.is_contiguous()
        assert int(ids.abs().max()) < 2**15, "the kernels hold ids in 16 bits"
        assert a["local_expert_offset"] == 0 and a["routed_scaling_factor"] is None
        return weights, ids

    def _trtllm(self, name, a):
        x = decode_input(a, name)
        weights, ids = self._routing(name, a)
        true_weights = (
            bits_of(weights) if weights.dtype == F32 and "routed" not in name else weights
        )
        rows, index = expert_rows(a, name, x, ids)
        if a["do_finalize"]:
            out = moe_finalize_fuse_shared(rows, index, true_weights, None, a["top_k"])
            if a["output"] is not None:
                assert "fp4" in name
                return [a["output"].copy_(out[:, : a["output"].shape[1]])]
            return [out] if "fp4" in name else out
        answer = [rows, weights, index.flatten()]
        return self.spoil(answer) if self.spoil else answer

    def _cutlass_fused_moe(self, name, a):
        ids, scales = a["token_selected_experts"], a["token_final_scales"]
        assert ids.dtype == torch.int32 and scales.dtype == F32 and a["use_fused_finalize"] is False
        a = {
            **a,
            "gemm1_weights": a["fc1_expert_weights"],
            "gemm2_weights": a["fc2_expert_weights"],
        }
        rows, index = expert_rows(a, "bf16", a["input"].float(), ids)
        return moe_finalize_fuse_shared(rows, index, scales, None, ids.shape[1])


def expert_rows(a, function, x, ids):
    """Return rows [P, H_pad] grouped by expert with NaN between them, and the index [T, K]."""
    up, down = decode_weights(a, function)
    index = torch.full(ids.shape, -1, dtype=torch.int32)
    parts, start = [], 0
    for expert in range(up.shape[0]):
        slots = (ids == expert).nonzero()
        hidden = x[slots[:, 0]] @ up[expert].t()
        if a.get("output1_scale_scalar") is not None:
            inner, gate = a["output1_scale_scalar"][expert], a["output1_scale_gate_scalar"][expert]
            half = hidden.shape[1] // 2
            hidden = torch.cat([hidden[:, :half] * inner, hidden[:, half:] * gate], dim=1)
        rows = up_first(hidden) @ down[expert].t()
        if a.get("output2_scale_scalar") is not None:
            rows = rows * a["output2_scale_scalar"][expert]
        count = -(-len(slots) // TILE) * TILE
        part = torch.full((count, down.shape[1]), float("nan"))
        part[: len(slots)] = rows
        index[slots[:, 0], slots[:, 1]] = torch.arange(start, start + len(slots)).int()
        parts.append(part)
        start += count
    return torch.cat(parts).to(BF16), index


def mislabel(weights):
    """bfloat16 weights in a buffer of as many float32: half of it is never written."""
    flat = torch.full((2 * weights.numel(),), float("nan"), dtype=BF16)
    flat[: weights.numel()] = weights.flatten()
    return flat.view(F32).view(weights.shape)


def bits_of(weights):
    return weights.flatten().view(BF16)[: weights.numel()].view(weights.shape)


def make_runner(quantization, version="0.7.4", *, spoil=None, **layer):
    fake = FakeFlashInfer(version, spoil=spoil)
    made = make_layer(quantization, **layer)
    return FlashInferTrtllmRunner(made.weights, functions=fake.functions()), made, fake
