# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The ``native`` runner: plain torch, any device and dtype, one expert after another."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.moe.autocast import autocast_off, is_autocast_on
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners.base import (
    RunnerEntry,
    Support,
    as_standard,
    can_finalize,
    register_runner,
    wants_defer,
)
from sgl_moe_jit.moe.runners.inference_only import check_quantized_input
from sgl_moe_jit.moe.runners.inputs import check_input_dtype, check_topk, weigh_input
from sgl_moe_jit.moe.runners.weighted_sum import weighted_sum
from sgl_moe_jit.moe.topk import TopKFormat, TopKOutput
from sgl_moe_jit.ops.quantize_rows import quantize_rows

_DEFERRABLE = (torch.bfloat16, torch.float32)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return [N, M] of rows [N, I]; with scales [M], in FP8 as the grouped GEMM would, dequantized.

    Products of two float8_e4m3fn are exact in float32 (and in TF32), so that only the order of
    the additions differs.
    """
    if scale is None:
        return torch.nn.functional.linear(x, weight, bias)
    values, row_scales = quantize_rows(x.to(torch.bfloat16))
    with autocast_off(x.device.type):
        total = torch.nn.functional.linear(values.float(), weight.float())
    out = (total * row_scales[:, None] * scale).to(torch.bfloat16)
    return out if bias is None else out + bias.to(out.dtype)


def _expert_rows(weights: ExpertWeights, expert: int, x: Tensor) -> Tensor:
    """Return one expert's output for its tokens: [N, H]."""
    up_bias = weights.up_bias[expert] if weights.up_bias is not None else None
    down_bias = weights.down_bias[expert] if weights.down_bias is not None else None
    up, down = weights.up[expert], weights.down[expert]
    if weights.is_transposed:
        up, down = up.t(), down.t()
    up_scale = down_scale = None
    if weights.quantization is not Quantization.NONE:
        up_scale = weights.up_scale_by_row()[expert]
        down_scale = weights.down_scale_by_row()[expert]
    hidden = weights.activate(_linear(x, up, up_bias, up_scale))
    if down.dtype == torch.float16 and weights.post_expert_norm is None:
        # A row may pass 65504 before its weight makes it small; see _sum_dtype.
        hidden, down = hidden.float(), down.float()
        down_bias = None if down_bias is None else down_bias.float()
        with autocast_off(x.device.type):
            return _linear(hidden, down, down_bias, None)
    rows = _linear(hidden, down, down_bias, down_scale)
    return rows if weights.post_expert_norm is None else weights.post_expert_norm(rows)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of rows until they are summed: of float16 weights float32."""
    return torch.float32 if dtype == torch.float16 else dtype


def _supports(config: RunnerConfig) -> Support:
    if config.quantization is Quantization.NONE:
        return Support(True)
    return Support(True, "one expert after another, dequantized to float32 as it is used")


def _deferral(config: RunnerConfig, topk_format: TopKFormat) -> Support:
    if config.dtype not in _DEFERRABLE:
        return Support(False, f"dtype: deferred are bfloat16 and float32, got {config.dtype}")
    if config.device.type not in ("cpu", "cuda"):
        return Support(False, f"device: the fused op needs cpu or cuda, got {config.device.type}")
    return Support(True)


class NativeRunner:
    """Runs a layer's experts in plain torch; the reference for every other runner.

    Rows are in expert order, and in slot order within an expert. Finished here, the sum is a plain
    torch expression in float32; deferred, it is the fused op's. The result has the weights' dtype,
    under autocast too, whose dtype the GEMMs have then. Rows of float16 experts stay float32 until
    they are summed: one may be beyond float16's range, and the sum within.

    FP8 experts are served too, with the rounding of activations that a grouped GEMM in FP8 has;
    the arithmetic between the roundings is float32. Then hidden states are bfloat16.
    """

    name = "native"
    mutates_input = False

    def __init__(self, weights: ExpertWeights, *, config: RunnerConfig | None = None) -> None:
        self._weights = weights
        self._config = RunnerConfig.of(weights) if config is None else config

    def can_defer(self, topk_format: TopKFormat) -> bool:
        """Return whether the fused op takes this layer's dtype and device; any format will do."""
        return _deferral(self._config, topk_format).ok

    def run(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """See :class:`MoERunner`. Synchronises with the device once an expert."""
        choice = as_standard(topk_output)
        check_topk(hidden_states, choice, self._config.hidden_dim)
        hidden_states, choice = weigh_input(hidden_states, choice)
        if self._config.quantization is not Quantization.NONE:
            if is_autocast_on(hidden_states.device.type):
                hidden_states = hidden_states.to(self._config.dtype)
            check_quantized_input(self.name, self._weights, hidden_states)
        else:
            check_input_dtype(hidden_states, self._config.dtype)
        ids = choice.topk_ids.reshape(-1)
        top_k = choice.topk_ids.shape[1]
        parts: list[Tensor] = []
        slots: list[Tensor] = []
        for expert in range(self._config.num_experts):
            slot = (ids == expert).nonzero().squeeze(1)
            if slot.numel() == 0:
                continue
            slots.append(slot)
            parts.append(_expert_rows(self._weights, expert, hidden_states[slot // top_k]))
        if parts:
            rows, slot_of_row = torch.cat(parts), torch.cat(slots)
        else:  # no token here: no row, yet a gradient of zero for every parameter and input
            rows = _expert_rows(self._weights, 0, hidden_states[:0])
            slot_of_row = ids.new_empty(0, dtype=torch.int64)
        rows = rows.to(_sum_dtype(self._config.dtype))  # autocast's until here
        can_defer = self.can_defer(choice.format) and can_finalize(top_k)
        if not (wants_defer(defer) and can_defer):
            return weighted_sum(rows, slot_of_row, choice).to(self._config.dtype)
        row_of = torch.full_like(ids, -1, dtype=torch.int32)
        row_of[slot_of_row] = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        weights = choice.topk_weights
        if weights.dtype not in _DEFERRABLE:
            weights = weights.float()
        return DeferredFinalizeOutput(
            gemm2_out=rows,
            expert_weights=weights.contiguous(),
            expanded_idx_to_permuted_idx=row_of.view(choice.topk_ids.shape),
            top_k=top_k,
            routed_scaling_factor=choice.routed_scaling_factor,
            hidden_dim=self._config.hidden_dim,
        )


register_runner(
    RunnerEntry(
        "native",
        _supports,
        NativeRunner,
        quantizations=(Quantization.NONE, Quantization.FP8_PER_CHANNEL),
        deferral=_deferral,
        bind=lambda weights, config: NativeRunner(weights, config=config),
    )
)
