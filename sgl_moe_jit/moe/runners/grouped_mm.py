# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The ``grouped_mm`` runner: permute, two grouped GEMMs of torch, and the fused finalize."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.autocast import autocast_off, is_autocast_on
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners import all_experts
from sgl_moe_jit.moe.runners.base import (
    RunnerEntry,
    Support,
    as_standard,
    can_finalize,
    register_runner,
    wants_defer,
)
from sgl_moe_jit.moe.runners.expert_gemms import ExpertGemms, PerChannelFp8Gemms, PlainGemms
from sgl_moe_jit.moe.runners.grouped_mm_support import DTYPES, supports
from sgl_moe_jit.moe.runners.inference_only import check_quantized_input
from sgl_moe_jit.moe.runners.inputs import check_input_dtype, check_topk, weigh_input
from sgl_moe_jit.moe.runners.weighted_sum import weighted_sum
from sgl_moe_jit.moe.topk import TopKFormat, TopKOutput
from sgl_moe_jit.ops.activation import silu_and_mul


class GroupedMMRunner:
    """Runs all of a layer's experts in two grouped GEMMs, without a device synchronisation.

    On a GPU, few tokens that are expected to hit most experts go through all of them in two batched
    GEMMs instead; see ``all_experts`` and ``SGL_MOE_JIT_ALL_EXPERTS_MAX_TOKENS``. A token's result
    may then differ by rounding from its result in a larger batch.

    The answer is always made by the fused finalize, so deferred and finished output agree bit for
    bit. Its dtype is the weights', under autocast too, where ``hidden_states`` are cast to it.

    FP8 experts (float8_e4m3fn, a float32 scale for each output row) go through torch's scaled
    grouped GEMM: tokens are quantized by row, once, before they are copied to their experts; the
    activation's output is quantized by row again. Dtype bfloat16, biases and finalize as ever,
    inference only.

    Args:
        weights: The layer's parameters.
        fused_activation: Whether ``silu_and_mul`` replaces ``weights.activation`` where that is
            declared to be the same function. It rounds once, torch's expression twice in bfloat16.
        config: Theirs, if it is at hand and was found to be supported; None: both are seen to here.

    Raises:
        UnsupportedError: the layer cannot be served; says why.
    """

    name = "grouped_mm"
    mutates_input = False

    def __init__(
        self,
        weights: ExpertWeights,
        *,
        fused_activation: bool = True,
        config: RunnerConfig | None = None,
    ) -> None:
        self._weights = weights
        if config is None:
            config = RunnerConfig.of(weights)
            support = supports(config)
            if not support.ok:
                why = f"runner 'grouped_mm' cannot serve this layer: {support.why}"
                raise UnsupportedError(why)
        self._config = config
        self._fused_activation = fused_activation and weights.is_silu_and_mul
        self._is_plain = self._config.quantization is Quantization.NONE
        self._gemms: ExpertGemms = (
            PlainGemms(weights) if self._is_plain else PerChannelFp8Gemms(weights)
        )

    def can_defer(self, topk_format: TopKFormat) -> bool:
        """Return True: other formats are converted first."""
        return True

    def _input(self, hidden_states: Tensor) -> Tensor:
        expected = self._config.dtype
        if hidden_states.dtype == expected:
            return hidden_states
        if self._is_plain:
            check_input_dtype(hidden_states, expected)
        elif not is_autocast_on(hidden_states.device.type):
            return hidden_states  # refused below, with the name of the quantization
        # Under autocast: grouped_mm is not on its list, so nobody else casts.
        return hidden_states.to(expected)

    def _expert_rows(self, hidden_states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' outputs [P, H], and each slot's row among them.

        Each stage's input is let go before the next stage asks for memory: at most H + 2I elements
        a row are alive (or 3I, or I + H), where all stages together have 2H + 3I.

        Rows without a slot hold leftovers, here and in the gradient. They stay in their rows while
        only GEMMs and elementwise code see them; a parameter applied to every row would sum them
        into its gradient, and 0 * NaN is NaN. So with gradients on they are cleared around it.
        """
        weights = self._weights
        x, row_of, expert_offsets = self._gemms.permute(hidden_states, ids)
        num_rows, dtype, device = row_of.numel(), hidden_states.dtype, hidden_states.device
        if not num_rows:
            return self._no_rows(hidden_states[:0]), row_of

        def row_numbers() -> Tensor:
            return torch.arange(num_rows, dtype=torch.int32, device=device)

        def clean(rows: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                return rows
            return rows.masked_fill((row_numbers() >= expert_offsets[-1])[:, None], 0)

        def add_bias(rows: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None:
                return rows
            # The first expert that ends beyond the row; for rows without a slot, the last one.
            expert = torch.searchsorted(expert_offsets, row_numbers(), right=True, out_int32=True)
            return clean(rows + bias[expert.clamp(max=bias.shape[0] - 1)].to(rows.dtype))

        up_out = add_bias(self._gemms.up(x, expert_offsets), weights.up_bias)
        del x
        if self._fused_activation:
            hidden = silu_and_mul(up_out)
        else:
            hidden = clean(weights.activate(clean(up_out)).to(dtype))
        del up_out
        rows = add_bias(self._gemms.down(hidden, expert_offsets), weights.down_bias)
        if weights.post_expert_norm is not None:
            rows = clean(weights.post_expert_norm(clean(rows)).to(dtype))
        return rows, row_of

    def _no_rows(self, x: Tensor) -> Tensor:
        """Return the outputs [0, H] of no rows, tied to every parameter.

        A rank without tokens must still give zero gradients, and grouped_mm's backward refuses an
        empty gradient that was expanded from a scalar.
        """
        weights = self._weights
        if weights.quantization is not Quantization.NONE:  # no gradients
            return x
        with autocast_off(x.device.type):
            rows = x @ weights.up_as_input_major()[0]
        if weights.up_bias is not None:
            rows = rows + weights.up_bias[0].to(rows.dtype)
        hidden = weights.activate(rows).to(x.dtype)
        with autocast_off(x.device.type):
            rows = hidden @ weights.down_as_input_major()[0]
        if weights.down_bias is not None:
            rows = rows + weights.down_bias[0].to(rows.dtype)
        if weights.post_expert_norm is not None:
            rows = weights.post_expert_norm(rows).to(x.dtype)
        return rows

    def run(
        self, hidden_states: Tensor, topk_output: TopKOutput, *, defer: bool | None = None
    ) -> Tensor | DeferredFinalizeOutput:
        """See :class:`MoERunner`. Does not synchronise with the device for top_k 1 to 64.

        Any other top_k is finished here, whatever ``defer`` says.

        Raises:
            TypeError: ``hidden_states`` are not of the weights' dtype, without autocast.
            UnsupportedError: a gradient through FP8 experts.
            ValueError: T * K is 2^31 or more: torch's offsets are int32.
        """
        choice = as_standard(topk_output)
        check_topk(hidden_states, choice, self._config.hidden_dim)
        deferred = wants_defer(defer)
        hidden_states, choice = weigh_input(hidden_states, choice)
        ids, expert_weights = choice.topk_ids, choice.topk_weights
        if expert_weights.dtype not in DTYPES:
            expert_weights = expert_weights.float()
        hidden_states = self._input(hidden_states)
        if self._config.quantization is not Quantization.NONE:
            check_quantized_input(self.name, self._weights, hidden_states)
        if self._is_plain and all_experts.serves(self._weights, hidden_states, choice):
            rows, row_of = all_experts.expert_rows(
                self._weights, hidden_states, ids, fused_activation=self._fused_activation
            )
        else:
            rows, row_of = self._expert_rows(hidden_states, ids)
        if not can_finalize(ids.shape[1]):
            slots = (row_of.reshape(-1) >= 0).nonzero().squeeze(1)
            present = rows[row_of.reshape(-1)[slots].long()]
            return weighted_sum(present, slots, choice)
        output = DeferredFinalizeOutput(
            gemm2_out=rows,
            expert_weights=expert_weights.contiguous(),
            expanded_idx_to_permuted_idx=row_of,
            top_k=ids.shape[1],
            routed_scaling_factor=choice.routed_scaling_factor,
            hidden_dim=self._config.hidden_dim,
        )
        return output if deferred else output.finalize()


register_runner(
    RunnerEntry(
        "grouped_mm",
        supports,
        GroupedMMRunner,
        quantizations=(Quantization.NONE, Quantization.FP8_PER_CHANNEL),
        deferral=lambda *_: Support(True),
        bind=lambda weights, config: GroupedMMRunner(weights, config=config),
    )
)
