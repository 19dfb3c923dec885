# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Router configurations of the routing tests: one for each step that families do differently."""

from sgl_moe_jit.moe.router_config import RouterConfig

E, K = 64, 6


def config(**changes):
    settings = {"num_experts": E, "top_k": K, "score_function": "softmax", **changes}
    return RouterConfig(**settings)


_V3 = {
    "score_function": "sigmoid",
    "has_correction_bias": True,
    "renormalize": True,
    "renormalize_epsilon": 1e-20,
    "routed_scaling_factor": 2.5,
}
CONFIGS = {
    "softmax": config(),
    "softmax_renormalized": config(renormalize=True),
    "softmax_of_top_k": config(score_after_top_k=True),
    "softmax_groups": config(n_group=8, topk_group=3, group_rule="max", routed_scaling_factor=16.0),
    "softmax_bias_clamp": config(
        has_correction_bias=True, renormalize=True, renormalize_epsilon=1e-12, epsilon_kind="clamp"
    ),
    "softmax_bias_scaled": config(has_correction_bias=True, routed_scaling_factor=6.0),
    "softmax_expert_scale": config(renormalize=True, has_expert_scale=True),
    "sigmoid_bias": config(**_V3),
    "sigmoid_groups": config(**_V3, n_group=8, topk_group=4),
    "sigmoid_one_group": config(**_V3, n_group=8, topk_group=1),
    "sigmoid_factor_due": config(**{**_V3, "renormalize_epsilon": 0.0}, scale_in_weights=False),
    "sigmoid_top_1": config(score_function="sigmoid", score_after_top_k=True, top_k=1),
    "sqrtsoftplus": config(**{**_V3, "score_function": "sqrtsoftplus"}),
    "top_all": config(top_k=E, renormalize=True),
}
