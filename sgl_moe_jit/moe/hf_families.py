# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The model families known here: what each one's code fixes, and which keys it reads.

Routing follows transformers 5.24, where the family is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sgl_moe_jit.moe.expert_config import Clamp
from sgl_moe_jit.moe.hf_keys import RENORMALIZE, SCALING

# How a family states its shared experts.
Shared = Literal["none", "count", "count_ernie", "width", "gated_width", "expert_width"]


@dataclass(frozen=True)
class Family:
    """What a family's code fixes, and the keys it reads.

    Attributes:
        router: Fields of ``RouterConfig`` that no key decides.
        bias: Whether there is a correction bias; ``key``: unless a key switches it off.
        renormalize: True or False: fixed; else keys, one of which must be there.
        scaling: Keys of the routed scaling factor, one of which must be there; none: no factor.
        groups: Whether experts are grouped, by keys that must be there.
        topk_methods: Values of ``topk_method`` known.
        group_method: That value of ``topk_method``, which must be there, turns grouping on.
        intermediate: Keys of the routed experts' width.
        hidden: Keys of the model's width.
        inner: Nested dictionary that holds the MoE keys.
        expert_hidden: Keys of a narrower width that the experts work in.
        zero_experts: Keys of the number of zero experts.
        shared: ``none``; ``count`` times the experts' width; ``width``: given by ``shared_width``;
            ``gated_width``: the same with a sigmoid gate; ``expert_width``: one as wide as an
            expert.
        shared_width: Keys of the shared experts' width.
        shared_is_total: Whether that is the width of all together, not of one.
        dense_branch: Keys of a dense MLP's width beside the experts.
        activation_keys: Keys of the activation's name.
        activations: Its names known.
        activation: Kind that the code fixes whatever ``hidden_act`` says.
        clamp: Meaning of the limit; None: the family has none.
        limit: Keys of the routed experts' limit.
        shared_limit: Keys of the shared experts' limit.
        alpha: Default of ``swiglu_alpha``, where the code fixes one.
    """

    router: dict[str, Any] = field(default_factory=dict)
    bias: bool | Literal["key"] = False
    renormalize: bool | tuple[str, ...] = RENORMALIZE
    scaling: tuple[str, ...] = ()
    groups: bool = False
    topk_methods: tuple[str, ...] = ("noaux_tc",)
    group_method: str | None = None
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    hidden: tuple[str, ...] = ("hidden_size",)
    inner: str | None = None
    expert_hidden: tuple[str, ...] = ()
    zero_experts: tuple[str, ...] = ()
    shared: Shared = "none"
    shared_width: tuple[str, ...] = ()
    shared_is_total: bool = True
    dense_branch: tuple[str, ...] = ()
    activation_keys: tuple[str, ...] = ("hidden_act",)
    activations: tuple[str, ...] = ("silu",)
    activation: Literal["swiglu_oai", "silu"] | None = None
    clamp: Clamp | None = None
    limit: tuple[str, ...] = ()
    shared_limit: tuple[str, ...] = ()
    alpha: float | None = None


# Sigmoid scores with a correction bias, in float32; groups by the sum of their two best.
_SIGMOID = {
    "score_function": "sigmoid",
    "renormalize_epsilon": 1e-20,
}
_MODEL = {"logits_dtype": "model"}
_SOFTMAX = {"score_function": "softmax", **_MODEL}
_CAST = {"weights_dtype": "logits"}
_EXPERT_IS_INTERMEDIATE = ("intermediate_size",)

_DEEPSEEK_V3 = Family(router=_SIGMOID, bias=True, scaling=SCALING, groups=True, shared="count")
_KIMI_LINEAR = replace(
    _DEEPSEEK_V3,
    expert_hidden=("routed_expert_hidden_size",),
    activations=("silu", "situ"),
)
_QWEN2 = Family(
    router={**_SOFTMAX, **_CAST},
    shared="gated_width",
    shared_width=("shared_expert_intermediate_size",),
)
_QWEN3 = replace(_QWEN2, shared="none")
_QWEN3_5 = replace(_QWEN2, renormalize=True)
_MIXTRAL = Family(router=_SOFTMAX, renormalize=True, intermediate=_EXPERT_IS_INTERMEDIATE)
_LLAMA4 = Family(
    router={
        "score_function": "sigmoid",
        "score_after_top_k": True,
        "weight_on_input": True,
        **_MODEL,
        **_CAST,
    },
    renormalize=False,
    intermediate=_EXPERT_IS_INTERMEDIATE,
    shared="expert_width",
)
# Sigmoid in float32 on logits of the model's dtype, and no epsilon; the factor comes after the
# experts, not into the weights.
_MINIMAX_M2 = Family(
    router={"score_function": "sigmoid", **_MODEL},
    bias="key",
    renormalize=True,
    intermediate=_EXPERT_IS_INTERMEDIATE,
    shared="width",
    shared_width=("shared_intermediate_size",),
)
_MINIMAX_M3 = replace(
    _MINIMAX_M2,
    router={**_MINIMAX_M2.router, "scale_in_weights": False},
    scaling=SCALING,
    activation="swiglu_oai",
    activations=("silu", "swigluoai"),
    clamp="before",
    limit=("swiglu_limit",),
    shared_limit=("swiglu_limit",),
)
_STEP = replace(
    _MINIMAX_M3,
    intermediate=("moe_intermediate_size",),
    shared_width=("share_expert_dim",),
    activation="silu",
    clamp="after",
    limit=("swiglu_limits",),
    shared_limit=("swiglu_limits_shared",),
)
_GEMMA4 = Family(
    router={**_SOFTMAX, "has_expert_scale": True},
    renormalize=True,
    activation_keys=("hidden_activation", "hidden_act"),
    activations=("gelu_pytorch_tanh",),
    dense_branch=("intermediate_size",),
)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        router={"score_function": "softmax", "group_rule": "max"},
        renormalize=False,
        scaling=SCALING,
        topk_methods=("greedy", "group_limited_greedy"),
        group_method="group_limited_greedy",
        shared="count",
    ),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe", "glm4_moe_lite"),
        _DEEPSEEK_V3,
    ),
    **dict.fromkeys(("glm_moe_dsa", "glm4v_moe", "dots1", "exaone_moe"), _DEEPSEEK_V3),
    **dict.fromkeys(("solar_open", "mimo_v2_flash"), _DEEPSEEK_V3),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), _KIMI_LINEAR),
    "bailing_hybrid": replace(
        _DEEPSEEK_V3,
        shared_width=("moe_shared_expert_intermediate_size",),
        shared_is_total=False,
        clamp="after",
        limit=("swiglu_limits",),
        shared_limit=("swiglu_limits_shared",),
    ),
    "nemotron_h": replace(
        _DEEPSEEK_V3,
        expert_hidden=("moe_latent_size",),
        shared="width",
        shared_width=("moe_shared_expert_intermediate_size",),
        activation_keys=("mlp_hidden_act",),
        activations=("relu2",),
    ),
    "hy_v3": replace(_DEEPSEEK_V3, renormalize=True, groups=False),
    "hy_v4": replace(_DEEPSEEK_V3, clamp="before", limit=("swiglu_limit",)),
    "deepseek_v4": Family(
        router={
            "score_function": "sqrtsoftplus",
            "scores_dtype": "logits",
            "renormalize_epsilon": 1e-20,
            **_MODEL,
            **_CAST,
        },
        bias=True,
        renormalize=True,
        scaling=SCALING,
        shared="count",
        clamp="before",
        limit=("swiglu_limit",),
        shared_limit=("swiglu_limit",),
    ),
    "qwen2_moe": _QWEN2,
    "qwen3_next": _QWEN2,
    "qwen3_moe": _QWEN3,
    "qwen3_vl_moe": replace(_QWEN3, renormalize=True),
    "qwen3_5_moe": _QWEN3_5,
    "olmoe": replace(_QWEN3, intermediate=_EXPERT_IS_INTERMEDIATE),
    "mixtral": _MIXTRAL,
    "gpt_oss": Family(
        router={
            "score_function": "softmax",
            "score_after_top_k": True,
            **_MODEL,
            **_CAST,
        },
        renormalize=False,
        intermediate=_EXPERT_IS_INTERMEDIATE,
        activation="swiglu_oai",
        clamp="before",
        limit=("swiglu_limit",),
        alpha=1.702,
    ),
    "llama4": _LLAMA4,
    "minimax_m2": _MINIMAX_M2,
    "minimax_m3_vl": _MINIMAX_M3,
    "step3p5": _STEP,
    "step3p7": _STEP,
    # The gate `wg` is made in float32; logits and weights have its dtype, whatever it is.
    "hunyuan_v1_moe": Family(
        router={**_SOFTMAX, **_CAST},
        renormalize=True,
        intermediate=("moe_intermediate_size", "intermediate_size"),
        shared="count",
    ),
    "ernie4_5_moe": Family(
        router={
            "score_function": "softmax",
            "renormalize_epsilon": 1e-12,
            "epsilon_kind": "clamp",
            "weights_dtype": "hidden",
        },
        bias=True,
        renormalize=True,
        shared="count_ernie",
    ),
    "longcat_flash": Family(
        router={"score_function": "softmax"},
        bias=True,
        renormalize=False,
        scaling=SCALING,
        intermediate=("expert_ffn_hidden_size",),
        zero_experts=("zero_expert_num",),
        dense_branch=("ffn_hidden_size",),
    ),
    "dbrx": Family(
        router={**_SOFTMAX, **_CAST, "scores_dtype": "logits"},
        renormalize=("moe_normalize_expert_weights",),
        intermediate=("ffn_hidden_size",),
        hidden=("d_model",),
        inner="ffn_config",
        activation_keys=("ffn_act_fn",),
    ),
    "gemma4": _GEMMA4,
    "lfm2_moe": Family(
        router={
            "score_function": "sigmoid",
            "scores_dtype": "logits",
            "renormalize_epsilon": 1e-6,
            **_MODEL,
            **_CAST,
        },
        bias="key",
        scaling=SCALING,
        activation="silu",
    ),
}
