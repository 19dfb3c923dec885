# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The routers of transformers, tiny, with random weights: what ours are compared with."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

HIDDEN, EXPERTS, TOP_K = 64, 64, 6
_BASE = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 32}
_V3 = {
    **_BASE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_QWEN = {**_BASE, "num_experts": EXPERTS, "norm_topk_prob": True}
_MIXTRAL = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_local_experts": EXPERTS}


@dataclass(frozen=True)
class Family:
    folder: str
    prefix: str
    router: str
    settings: dict
    config: str = "Config"


# One for each way to route in B2, and the classes that share one where it costs nothing.
FAMILIES = {
    "deepseek_v2": Family(
        "deepseek_v2",
        "DeepseekV2",
        "TopkRouter",
        {
            **_V3,
            "topk_method": "group_limited_greedy",
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
        },
    ),
    "deepseek_v2_lite": Family(
        "deepseek_v2",
        "DeepseekV2",
        "TopkRouter",
        {
            **_V3,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
    ),
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3", "TopkRouter", _V3),
    "deepseek_v32": Family("deepseek_v32", "DeepseekV32", "TopkRouter", _V3),
    "glm4_moe": Family("glm4_moe", "Glm4Moe", "TopkRouter", {**_V3, "n_group": 1, "topk_group": 1}),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        "MiMoV2Flash",
        "TopkRouter",
        {**_V3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": None},
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "NemotronH",
        "TopkRouter",
        {**_V3, "n_group": 1, "topk_group": 1, "moe_latent_size": 32},
    ),
    "bailing_hybrid": Family(
        "bailing_hybrid", "BailingHybrid", "TopkRouter", {**_V3, "num_experts": EXPERTS}
    ),
    "kimi_linear": Family(
        "kimi_linear", "KimiLinear", "TopkRouter", {**_V3, "num_experts": EXPERTS}
    ),
    "hy_v3": Family(
        "hy_v3",
        "HYV3",
        "TopKRouter",
        {**_BASE, "num_experts": EXPERTS, "router_scaling_factor": 2.826},
    ),
    "deepseek_v4": Family(
        "deepseek_v4",
        "DeepseekV4",
        "TopKRouter",
        {**_BASE, "n_routed_experts": EXPERTS, "routed_scaling_factor": 1.5},
    ),
    "qwen2_moe": Family("qwen2_moe", "Qwen2Moe", "TopKRouter", {**_QWEN, "norm_topk_prob": False}),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe", "TopKRouter", _QWEN),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", "TopKRouter", _QWEN),
    "qwen3_5_moe": Family("qwen3_5_moe", "Qwen3_5Moe", "TopKRouter", _QWEN, "TextConfig"),
    "olmoe": Family("olmoe", "Olmoe", "TopKRouter", {**_QWEN, "norm_topk_prob": False}),
    "mixtral": Family("mixtral", "Mixtral", "TopKRouter", _MIXTRAL),
    "gpt_oss": Family("gpt_oss", "GptOss", "TopKRouter", _MIXTRAL),
    "llama4": Family(
        "llama4", "Llama4", "Router", {**_MIXTRAL, "num_experts_per_tok": 1}, "TextConfig"
    ),
    "minimax_m2": Family("minimax_m2", "MiniMaxM2", "TopKRouter", _MIXTRAL),
    "minimax_m3_vl": Family(
        "minimax_m3_vl",
        "MiniMaxM3VL",
        "TopKRouter",
        {**_MIXTRAL, "routed_scaling_factor": 2.0},
        "TextConfig",
    ),
    "step3p7": Family(
        "step3p7",
        "Step3p7",
        "TopKRouter",
        {**_BASE, "n_routed_experts": EXPERTS, "moe_router_scaling_factor": 3.0},
        "TextConfig",
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        "Gate",
        {"hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_topk": TOP_K},
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        "TopKRouter",
        {**_BASE, "moe_num_experts": EXPERTS, "moe_k": TOP_K},
    ),
    "longcat_flash": Family(
        "longcat_flash",
        "LongcatFlash",
        "TopkRouter",
        {
            "hidden_size": HIDDEN,
            "n_routed_experts": 48,
            "zero_expert_num": 16,
            "moe_topk": TOP_K,
            "expert_ffn_hidden_size": 32,
            "routed_scaling_factor": 6.0,
        },
    ),
    "dbrx": Family(
        "dbrx",
        "Dbrx",
        "FFN",
        {
            "d_model": HIDDEN,
            "ffn_config": {
                "moe_num_experts": EXPERTS,
                "moe_top_k": TOP_K,
                "ffn_hidden_size": 32,
                "moe_normalize_expert_weights": 1.0,
            },
        },
    ),
    "gemma4": Family(
        "gemma4",
        "Gemma4Text",
        "Router",
        {
            "hidden_size": HIDDEN,
            "num_experts": EXPERTS,
            "top_k_experts": TOP_K,
            "moe_intermediate_size": 32,
            "enable_moe_block": True,
        },
    ),
    "lfm2_moe": Family("lfm2_moe", "Lfm2Moe", "TopKRouter", _QWEN),
}


@dataclass
class Built:
    """A router of transformers, and what ours needs of it.

    ``gate`` [E, H], ``gate_bias``, ``bias`` (correction), ``scale`` (per expert); ``run`` gives
    (logits, weights, ids) of hidden states.
    """

    config: object
    router: torch.nn.Module
    gate: torch.Tensor
    gate_bias: torch.Tensor | None
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    run: object


def config_of(name: str):
    family = FAMILIES[name]
    module = importlib.import_module(
        f"transformers.models.{family.folder}.configuration_{family.folder}"
    )
    return getattr(module, family.prefix + family.config)(**family.settings)


def build(name: str, dtype: torch.dtype, seed: int = 0) -> Built:
    """The router in that dtype; what the family keeps in float32 keeps it."""
    family, config = FAMILIES[name], config_of(name)
    module = importlib.import_module(
        f"transformers.models.{family.folder}.modeling_{family.folder}"
    )
    torch.manual_seed(seed)
    router = getattr(module, family.prefix + family.router)(config).eval()
    with torch.no_grad():
        for key, tensor in (*router.named_parameters(), *router.named_buffers()):
            if "bias" in key:
                tensor.normal_(0, 0.1)
            elif "scale" in key:
                tensor.uniform_(0.5, 1.5)
            elif "experts." not in key:
                tensor.normal_(0, 2 * HIDDEN**-0.5)
    # `wg` is made in float32, and the router looks at its dtype.
    keeps = ("correction_bias", "wg.", *(getattr(_model(module, family), _KEEP, None) or ()))
    float32 = {k: t.data for k, t in router.named_parameters() if _kept(k, keeps)}
    float32 |= {k: t for k, t in router.named_buffers() if _kept(k, keeps)}
    router.to(dtype)
    for key, tensor in (*router.named_parameters(), *router.named_buffers()):
        if key in float32:
            tensor.data = float32[key]
    return _wire(name, config, router)


_KEEP = "_keep_in_fp32_modules_strict"


def _kept(key: str, keeps) -> bool:
    return any(part in f"gate.{key}" for part in keeps)


def _model(module, family):
    names = [
        n for n in dir(module) if n.startswith(family.prefix) and n.endswith("PreTrainedModel")
    ]
    return getattr(module, names[0], None) if names else None


def _wire(name, config, router) -> Built:
    bias, scale, gate_bias, run = None, None, None, router
    if name in ("hy_v3", "minimax_m2", "lfm2_moe"):  # the block holds the bias
        bias = torch.randn(EXPERTS) * 0.1

        def run(x):
            return router(x, bias)

    elif name == "ernie4_5_moe":
        bias = router.moe_statics.e_score_correction_bias.detach().squeeze()
    else:
        bias = getattr(router, "e_score_correction_bias", None)
    if name == "hunyuan_v1_moe":
        gate = router.wg.weight
    elif name == "longcat_flash":
        gate = router.classifier.weight
    elif name == "gemma4":
        gate, scale = router.proj.weight, router.per_expert_scale
    elif name == "dbrx":
        gate = router.router.layer.weight

        def run(x):
            logits = router.router(x)
            return logits, *router.route_tokens_to_experts(logits)

    else:
        gate, gate_bias = router.weight, getattr(router, "bias", None)
    if name == "llama4":

        def run(x):
            dense, logits = router(x)
            ids = dense.argmax(-1, keepdim=True)
            return logits, dense.gather(-1, ids), ids

    return Built(config, router, gate, gate_bias, bias, scale, run)
