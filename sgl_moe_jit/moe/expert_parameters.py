# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One layer's expert tensors as parameters of a module, in the layouts checkpoints have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_moe_jit.moe.activation_kinds import GatedActivation, SwiGlu
from sgl_moe_jit.moe.expert_weights import ExpertWeights
from sgl_moe_jit.moe.runner_config import RunnerConfig

if TYPE_CHECKING:
    from typing_extensions import Self

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ParameterNames:
    """Under which names a layer registers its tensors."""

    up: str
    down: str
    up_bias: str
    down_bias: str
    up_scale: str
    down_scale: str

    @classmethod
    def of(cls, up: str, down: str) -> Self:
        """Return two projections' names with the field's suffixes for what belongs to them."""
        return cls(up, down, f"{up}_bias", f"{down}_bias", f"{up}_scale", f"{down}_scale")


SGLANG_NAMES = ParameterNames.of("w13_weight", "w2_weight")
GATED_NAMES = ParameterNames.of("gate_up_proj", "down_proj")
UNGATED_NAMES = ParameterNames.of("up_proj", "down_proj")


def _laid_out(activation: Activation | None, is_concatenated: bool) -> tuple[Activation, bool]:
    """Return the activation for a layout, and whether it is plain ``silu_and_mul``."""
    if activation is None:
        activation = SwiGlu()
    if isinstance(activation, GatedActivation):
        activation = activation.laid_out(is_concatenated)
    return activation, isinstance(activation, SwiGlu) and activation.is_silu_and_mul


class ExpertParameters(torch.nn.Module):
    """Expert tensors, registered as they are given and looked up by name in every call.

    A ``Parameter`` is registered as the same object, a tensor on the same storage. Nothing is
    copied, packed or kept beside them.

    E experts on this rank, H hidden size, I expert width.

    Args:
        weights: The tensors, their declared layout and the activation. Modules among them
            (activation, post_expert_norm) become submodules.
        names: Names of the parameters; None: transformers'.

    Raises:
        ValueError: shapes do not belong together, or a tensor that is no ``Parameter`` requires a
            gradient.
    """

    activation: Activation
    post_expert_norm: Callable[[Tensor], Tensor] | None

    def __init__(self, weights: ExpertWeights, *, names: ParameterNames | None = None) -> None:
        super().__init__()
        config = RunnerConfig.of(weights)  # checks the shapes
        self.hidden_dim = config.hidden_dim
        self.intermediate_dim = config.intermediate_dim
        self.num_local_experts = config.num_experts
        self.names = names or (GATED_NAMES if weights.has_gate else UNGATED_NAMES)
        self.is_transposed, self.has_gate = weights.is_transposed, weights.has_gate
        self.is_silu_and_mul = weights.is_silu_and_mul
        self.activation = weights.activation
        self.post_expert_norm = weights.post_expert_norm
        self._register(self.names.up, weights.up)
        self._register(self.names.down, weights.down)
        self._register(self.names.up_bias, weights.up_bias)
        self._register(self.names.down_bias, weights.down_bias)
        self._register(self.names.up_scale, weights.up_scale)
        self._register(self.names.down_scale, weights.down_scale)

    def _register(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
            if tensor.requires_grad:
                raise ValueError(
                    f"{name}: expected a torch.nn.Parameter or a tensor that requires no gradient, "
                    "got one that does, which would stay without it; pass the Parameter itself"
                )
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(name, tensor)

    @classmethod
    def from_w13_w2(
        cls,
        w13: Tensor,
        w2: Tensor,
        *,
        activation: Activation | None = None,
        has_gate: bool = True,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Build from sglang's layout: w13 [E, 2I, H], gate above up; w2 [E, H, I].

        Args:
            w13: [E, 2I, H]; without a gate [E, I, H].
            w2: [E, H, I].
            activation: One of ``activation_kinds``, or any callable from [N, 2I] to [N, I] (from
                [N, I] without a gate). None: SwiGLU.
            has_gate: Whether w13 holds a gate.
            w13_bias: [E, 2I] (or [E, I]), or None.
            w2_bias: [E, H], or None.
            w13_scale: Of float8_e4m3fn weights: float32 [E, 2I] (or [E, I]), a last dimension of 1
                allowed. Becomes ``w13_weight_scale``.
            w2_scale: The same, [E, H].
            **options: Of the class.
        """
        activation, plain = _laid_out(activation, is_concatenated=True)
        weights = ExpertWeights(
            w13,
            w2,
            activation,
            has_gate=has_gate,
            up_bias=w13_bias,
            down_bias=w2_bias,
            is_silu_and_mul=plain,
            up_scale=w13_scale,
            down_scale=w2_scale,
        )
        return cls(weights, names=SGLANG_NAMES, **options)

    @classmethod
    def from_gate_up_down(
        cls,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        is_transposed: bool,
        is_concatenated: bool,
        activation: Activation | None = None,
        has_gate: bool = True,
        gate_up_proj_bias: Tensor | None = None,
        down_proj_bias: Tensor | None = None,
        gate_up_proj_scale: Tensor | None = None,
        down_proj_scale: Tensor | None = None,
        **options: Any,
    ) -> Self:
        """Build from the layouts of transformers, which only the two flags tell apart.

        Args:
            gate_up_proj: [E, 2I, H], or [E, H, 2I] when ``is_transposed``; I for 2I without a gate.
            down_proj: [E, H, I], or [E, I, H] when ``is_transposed``.
            is_transposed: Whether matrices are stored input-major.
            is_concatenated: Whether gate and up are halves; else they alternate, gate first. For
                ``activation_kinds``; any other callable gets the projection's output as it is.
            activation: See :meth:`from_w13_w2`.
            has_gate: Whether there is a gate.
            gate_up_proj_bias: [E, 2I] (or [E, I]), or None.
            down_proj_bias: [E, H], or None.
            gate_up_proj_scale: See ``w13_scale``; a scale belongs to an output row in either
                layout.
            down_proj_scale: See ``w2_scale``.
            **options: Of the class.
        """
        activation, plain = _laid_out(activation, is_concatenated)
        weights = ExpertWeights(
            gate_up_proj,
            down_proj,
            activation,
            is_transposed=is_transposed,
            has_gate=has_gate,
            up_bias=gate_up_proj_bias,
            down_bias=down_proj_bias,
            is_silu_and_mul=plain,
            up_scale=gate_up_proj_scale,
            down_scale=down_proj_scale,
        )
        return cls(weights, **options)

    def tensors(
        self,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return both projections, their biases and their scales as they are now."""
        names = self.names

        def current(name: str) -> Any:
            # Past Module.__getattr__, which is slow. A parametrized one is a property instead.
            return own[name] if name in own else getattr(self, name)

        own = self._parameters
        return (
            current(names.up),
            current(names.down),
            current(names.up_bias),
            current(names.down_bias),
            current(names.up_scale),
            current(names.down_scale),
        )

    def expert_weights(self) -> ExpertWeights:
        """Return the current parameters, as a runner wants them."""
        up, down, up_bias, down_bias, up_scale, down_scale = self.tensors()
        return ExpertWeights(
            up=up,
            down=down,
            activation=self.activation,
            is_transposed=self.is_transposed,
            has_gate=self.has_gate,
            up_bias=up_bias,
            down_bias=down_bias,
            post_expert_norm=self.post_expert_norm,
            is_silu_and_mul=self.is_silu_and_mul,
            up_scale=up_scale,
            down_scale=down_scale,
        )

    def extra_repr(self) -> str:
        """Return sizes and layout, for ``repr``."""
        return (
            f"experts={self.num_local_experts}, hidden={self.hidden_dim}, "
            f"width={self.intermediate_dim}, is_transposed={self.is_transposed}, "
            f"has_gate={self.has_gate}, activation={self.activation}"
        )
