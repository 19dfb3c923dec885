# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A router as a module: gate, correction bias, and the choice of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.input_checks import described, rows_of
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import router_logits, select_experts
from sgl_moe_jit.moe.topk import BypassedTopKOutput, StandardTopKOutput
from sgl_moe_jit.ops.finalize_arguments import check_int

if TYPE_CHECKING:
    from typing_extensions import Self


def moving_only(
    fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor | None]
) -> Callable[[Tensor], Tensor]:
    """Return a module's conversion that moves some tensors and does not cast them."""
    ids = {id(x) for x in kept}

    def move_only(x: Tensor) -> Tensor:
        out = fn(x)
        return x.to(out.device) if id(x) in ids and out.dtype != x.dtype else out

    return move_only


class Router(torch.nn.Module):
    """Gate weight, correction bias and the family's routing.

    The correction bias is float32 and stays so, bit for bit, through ``.to(bfloat16)``,
    ``.half()``, a bfloat16 default dtype, ``to_empty``, saving and loading: in bfloat16 the biases
    of public models collapse to a few values. Gate weight and gate bias stay so too where the
    family computes its logits in float32. Names in ``state_dict`` are those of DeepSeek-V3-style
    checkpoints.

    E = ``config.num_experts``, H = ``hidden_dim``.

    Args:
        config: The family's routing.
        hidden_dim: H.
        bias: Whether the gate has a bias.
        device: Of all tensors.
        dtype: Of gate weight and gate bias, where ``config.logits_dtype`` is ``"model"``.

    Attributes:
        weight: [E, H].
        bias: [E], or None.
        e_score_correction_bias: [E] float32 buffer, or None.
        per_expert_scale: [E], or None.

    Raises:
        TypeError: ``config`` is not a ``RouterConfig``, or ``hidden_dim`` not an int.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    e_score_correction_bias: Tensor | None
    per_expert_scale: torch.nn.Parameter | None

    def __init__(
        self,
        config: RouterConfig,
        hidden_dim: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, RouterConfig):
            raise TypeError(f"config: expected a RouterConfig, got {described(config)}")
        check_int("hidden_dim", hidden_dim, "at least 1")
        self.config = config
        num_experts = config.num_experts
        gate = torch.float32 if config.logits_dtype == "float32" else dtype

        def parameter(*shape: int, of: torch.dtype | None) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=of))

        self.weight = parameter(num_experts, hidden_dim, of=gate)
        self.register_parameter("bias", parameter(num_experts, of=gate) if bias else None)
        scale = parameter(num_experts, of=dtype) if config.has_expert_scale else None
        self.register_parameter("per_expert_scale", scale)
        correction = None
        if config.has_correction_bias:
            correction = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", correction)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gate to random values as ``torch.nn.Linear`` does, biases to 0, scales to 1."""
        torch.nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.per_expert_scale is not None:
            torch.nn.init.ones_(self.per_expert_scale)
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.zero_()

    def _float32_names(self) -> tuple[str, ...]:
        gate = ("weight", "bias") if self.config.logits_dtype == "float32" else ()
        return ("e_score_correction_bias", *gate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let conversions move what stays float32, and not cast it."""
        kept = [getattr(self, name) for name in self._float32_names()]
        fn = moving_only(fn, kept)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load, and widen what ``assign=True`` has put in place as it was."""
        super()._load_from_state_dict(*args, **kwargs)
        for name in self._float32_names():
            x = getattr(self, name)
            if x is not None and x.dtype != torch.float32:
                x.data = x.data.float()

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits [T, E] of hidden states [..., H]; T: all leading dimensions."""
        rows = rows_of(hidden_states, self.weight.shape[1])
        return router_logits(rows, self.weight, self.config, self.bias)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        num_token_non_padded: Tensor | int | None = None,
        topk_ids: Tensor | None = None,
    ) -> StandardTopKOutput:
        """Route hidden states [..., H]; arguments and errors of ``select_experts``."""
        return select_experts(
            self.logits(hidden_states),
            self.config,
            self.e_score_correction_bias if topk_ids is None else None,
            num_token_non_padded=num_token_non_padded,
            topk_ids=topk_ids,
            expert_scale=self.per_expert_scale,
            hidden_dtype=hidden_states.dtype,
        )

    def bypass(
        self, hidden_states: Tensor, *, num_token_non_padded: Tensor | int | None = None
    ) -> BypassedTopKOutput:
        """Return the logits and settings, for a runner whose kernel routes."""
        return BypassedTopKOutput(
            self.logits(hidden_states),
            self.config,
            self.e_score_correction_bias,
            num_token_non_padded,
            self.per_expert_scale,
            hidden_states.dtype,
        )

    def extra_repr(self) -> str:
        """Return the config, for ``repr``."""
        return f"{self.config}"
