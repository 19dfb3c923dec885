# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""How a router's choice travels to a runner."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sgl_moe_jit.moe.input_checks import check_dense
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk_selection import select
from sgl_moe_jit.ops.finalize_arguments import check_factor


class TopKFormat(enum.Enum):
    """Form of a router's output."""

    STANDARD = "standard"
    """Weights and expert ids, [T, K] each."""
    BYPASSED = "bypassed"
    """Router logits and settings: the runner's kernel routes."""
    PACKED = "packed"
    """Id and weight in one int32 a slot."""


@dataclass(frozen=True)
class StandardTopKOutput:
    """Expert ids and weights of each token.

    Attributes:
        topk_weights: [T, K] floating. Weights of slots without an expert are ignored.
        topk_ids: [T, K] int32 or int64. Negative, or at or above the number of local experts: no
            expert here (masked, padded, or on another rank).
        routed_scaling_factor: Factor still due on the routed sum; 1.0 when the weights already hold
            it. Whoever finishes the sum applies it, once.
        weight_on_input: The weights multiply the experts' input, not their output; K is 1. The
            runner does it, once.
        num_experts: Of how many experts the ids were chosen, those of other ranks counted; None:
            not known. Decides about speed alone.
    """

    topk_weights: Tensor
    topk_ids: Tensor
    routed_scaling_factor: float = 1.0
    weight_on_input: bool = False
    num_experts: int | None = None

    def __post_init__(self) -> None:
        """Refuse a factor that is a tensor, whose gradient a runner could lose.

        Raises:
            TypeError: the factor is not a number.
            ValueError: ``weight_on_input`` with K other than 1.
        """
        check_factor(self.routed_scaling_factor)
        if self.weight_on_input and self.topk_ids.shape[-1] != 1:
            raise ValueError(
                "topk_ids: expected one expert a token, since weight_on_input scales a token once, "
                f"got {self.topk_ids.shape[-1]}"
            )

    @property
    def format(self) -> TopKFormat:
        """``TopKFormat.STANDARD``."""
        return TopKFormat.STANDARD


@dataclass(frozen=True)
class BypassedTopKOutput:
    """Router logits and what it takes to route them: for kernels that route themselves.

    Attributes:
        router_logits: [T, E] floating.
        router_config: How to choose and weigh.
        correction_bias: [E] float32, or None: as ``router_config`` says.
        num_token_non_padded: Rows from here on are padding: one integer on the logits' device, so
            that a captured graph sees it change, or an int; None: no padding.
        expert_scale: [E], or None: as ``router_config`` says.
        hidden_dtype: Dtype of the hidden states, for families that return weights in it.
    """

    router_logits: Tensor
    router_config: RouterConfig
    correction_bias: Tensor | None = None
    num_token_non_padded: Tensor | int | None = None
    expert_scale: Tensor | None = None
    hidden_dtype: torch.dtype | None = None

    @property
    def format(self) -> TopKFormat:
        """``TopKFormat.BYPASSED``."""
        return TopKFormat.BYPASSED

    def to_standard(self) -> StandardTopKOutput:
        """Route; arguments and errors of :func:`sgl_moe_jit.select_experts`."""
        weights, ids = select(
            self.router_logits,
            self.router_config,
            self.correction_bias,
            num_token_non_padded=self.num_token_non_padded,
            topk_ids=None,
            expert_scale=self.expert_scale,
            hidden_dtype=self.hidden_dtype,
        )
        config = self.router_config
        return StandardTopKOutput(
            weights,
            ids,
            config.due_scaling_factor,
            config.weight_on_input,
            config.num_experts,
        )


@dataclass(frozen=True)
class PackedTopKOutput:
    """Id and weight of a slot in one int32: ``id << 16 | bits of the weight as bfloat16``.

    Attributes:
        packed_ids: [T, K] int32. Ids from -32768 to 32767; negative: no expert, whatever the weight
            (its low half may be anything).
        routed_scaling_factor: See :class:`StandardTopKOutput`.
        weight_on_input: See :class:`StandardTopKOutput`.
    """

    packed_ids: Tensor
    routed_scaling_factor: float = 1.0
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        """Refuse other dtypes.

        Raises:
            TypeError: ``packed_ids`` is no int32 tensor, or the factor is not a number.
        """
        check_factor(self.routed_scaling_factor)
        check_dense("packed_ids", self.packed_ids)
        if self.packed_ids.dtype != torch.int32:
            raise TypeError(f"packed_ids: expected int32, got {self.packed_ids.dtype}")

    @property
    def format(self) -> TopKFormat:
        """``TopKFormat.PACKED``."""
        return TopKFormat.PACKED

    @classmethod
    def pack(cls, topk_output: StandardTopKOutput) -> PackedTopKOutput:
        """Pack ids and weights. Weights are rounded to bfloat16, to nearest even.

        Ids are not checked, which would take a synchronisation: outside -32768 to 32767 they wrap.

        Raises:
            RuntimeError: a gradient of the weights is wanted; integers carry none.
        """
        weights = topk_output.topk_weights
        if weights.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "topk_weights: expected no gradient, since packed ids are integers and would drop "
                "it; use the STANDARD format, or detach the weights"
            )
        bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
        return cls(
            topk_output.topk_ids.to(torch.int32) << 16 | bits,
            topk_output.routed_scaling_factor,
            topk_output.weight_on_input,
        )

    def to_standard(self) -> StandardTopKOutput:
        """Return int32 ids and bfloat16 weights: exactly what was packed."""
        # A bfloat16 is the upper half of a float32.
        weights = (self.packed_ids << 16).view(torch.float32).to(torch.bfloat16)
        return StandardTopKOutput(
            weights, self.packed_ids >> 16, self.routed_scaling_factor, self.weight_on_input
        )


TopKOutput: TypeAlias = StandardTopKOutput | BypassedTopKOutput | PackedTopKOutput
