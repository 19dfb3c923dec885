# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A model's MoE layer as its configuration describes it: sizes, routing, experts, precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_moe_jit.moe.expert_config import ActivationConfig, SharedExpertsConfig
from sgl_moe_jit.moe.hf_config import read
from sgl_moe_jit.moe.router_config import RouterConfig


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer of a model.

    Attributes:
        model_type: As transformers names the family that was read.
        hidden_dim: Of the model.
        expert_hidden_dim: Of the experts' input and output; smaller in latent models.
        intermediate_dim: Of one routed expert.
        num_experts: Routed experts that have weights.
        num_zero_experts: Experts without weights that give their input back; ids from
            ``num_experts`` on.
        top_k: Experts a token, zero experts included.
        router: How they are chosen and weighed.
        activation: Of the routed experts.
        shared_experts: None: none.
        dense_branch_dim: Width of a dense MLP that the model runs beside the routed experts, as a
            part of its own and not of the MoE block; None: none.
        quantization: Format of the routed experts' weights, None: not quantized.
        moe_layers: Indices of the layers that are MoE layers, as far as the configuration tells.
        hash_layers: Those of them that take their experts from a table of token ids.
        has_latent_norm: Whether a latent model norms the routed sum before it is widened again.
    """

    model_type: str
    hidden_dim: int
    expert_hidden_dim: int
    intermediate_dim: int
    num_experts: int
    num_zero_experts: int
    top_k: int
    router: RouterConfig
    activation: ActivationConfig
    shared_experts: SharedExpertsConfig | None = None
    dense_branch_dim: int | None = None
    quantization: str | None = None
    moe_layers: tuple[int, ...] | None = None
    hash_layers: tuple[int, ...] = ()
    has_latent_norm: bool = False

    def routed_weight_bytes(self, bytes_per_weight: float = 2) -> int:
        """Return the size of the routed experts' matrices in bytes; default: bfloat16."""
        matrices = 3 if self.activation.is_gated else 2
        weights = matrices * self.num_experts * self.expert_hidden_dim * self.intermediate_dim
        return int(weights * bytes_per_weight)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | Any, layer_idx: int | None = None) -> MoEConfig:
        """Read a transformers configuration, or the dictionary of a ``config.json``.

        Sizes and routing come from the configuration's own keys, never from a class's defaults:
        those are not the checkpoints'. A value of null or 0 means "off" where the families use it
        so (scaling factor, groups, shared experts, limits). What is not known is refused by name.

        Args:
            config: A ``PreTrainedConfig`` or a mapping; a ``text_config`` inside is followed.
            layer_idx: The layer asked about. Needed where a value is a list, one entry a layer.

        Raises:
            UnsupportedError: an unknown model type, or an unknown value of a known key.
            TypeError: ``config`` is neither a configuration nor a mapping.
            ValueError: a key is missing (names those tried) or its value is of another kind, keys
                contradict each other, a list needs ``layer_idx``, or the layer asked about is not
                an MoE layer.
        """
        return cls(**read(config, layer_idx))
