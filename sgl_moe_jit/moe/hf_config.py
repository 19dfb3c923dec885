# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a Hugging Face configuration into the fields of ``MoEConfig``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe import hf_keys as names
from sgl_moe_jit.moe.expert_config import ActivationConfig, ActivationKind, SharedExpertsConfig
from sgl_moe_jit.moe.hf_families import FAMILIES, Family
from sgl_moe_jit.moe.hf_keys import Keys
from sgl_moe_jit.moe.hf_layers import hash_layers, moe_layers
from sgl_moe_jit.moe.hf_quantization import formats
from sgl_moe_jit.moe.router_config import RouterConfig

# What `hidden_act` calls them. `swigluoai` stands for a formula that the family fixes.
_KINDS: dict[str, ActivationKind] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "situ": "situ",
}
_FLOAT32 = ("float32", "fp32", "torch.float32")
# Keys that bound or bend an activation.
_LIMIT = re.compile(r"swiglu.*(limit|alpha|beta)|(expert|mlp|act).*clamp")


def _as_dict(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise TypeError(
            "config: expected a transformers configuration or a mapping, got "
            f"{type(config).__name__}"
        )
    values: Mapping[str, Any] = to_dict()
    return values


def _inner(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = values.get(name)
    return names.mapping(name, _as_dict(inner) if hasattr(inner, "to_dict") else inner)


def _find_family(outer: Mapping[str, Any]) -> tuple[str, Family, Mapping[str, Any]]:
    """Return the model type read, its family, and the dictionary that holds its keys."""
    text = outer.get("text_config")
    values = text if isinstance(text, Mapping) else outer
    tried = [t for t in (outer.get("model_type"), values.get("model_type")) if t is not None]
    for model_type in tried:
        if not isinstance(model_type, str):
            raise names.wrong("model_type", "a string", model_type)
        family = FAMILIES.get(model_type.removesuffix("_text"))
        if family is not None:
            return model_type.removesuffix("_text"), family, values
    got = " in ".join(map(repr, reversed(dict.fromkeys(tried)))) or "none"
    raise UnsupportedError(
        f"model_type: expected one of {', '.join(sorted(FAMILIES))}; got {got}. Describe its layer "
        "with MoEConfig and RouterConfig yourself, after its own code"
    )


def _router(keys: Keys, family: Family, num_experts: int, top_k: int, hashed: bool) -> RouterConfig:
    fields = dict(family.router)
    keys.expect(names.SCORE_FUNCTION, (fields["score_function"],))
    keys.expect(("topk_method",), family.topk_methods)
    if isinstance(family.renormalize, bool):
        fields["renormalize"] = family.renormalize
    else:
        keys.require_present(family.renormalize, "renormalisation switch")
        if family.inner is not None:  # DBRX: the order of the norm
            keys.expect(family.renormalize, (1, 1.0))
            fields["renormalize"] = keys.find(family.renormalize) is not None
        else:
            fields["renormalize"] = keys.flag(family.renormalize, False)
    minimum = keys.number(("moe_norm_min",))
    if minimum is not None and fields.get("epsilon_kind") == "clamp":
        fields["renormalize_epsilon"] = minimum
    if not fields["renormalize"]:
        fields["renormalize_epsilon"] = 0.0
    if family.scaling:
        keys.require_present(family.scaling, "routed scaling factor")
        fields["routed_scaling_factor"] = keys.factor(family.scaling)
    bias = keys.flag(names.HAS_BIAS, True) if family.bias == "key" else family.bias
    wide = keys.find(("moe_router_dtype", "router_dtype"))
    if wide in _FLOAT32 or keys.flag(("need_fp32_gate",), False):
        fields["logits_dtype"] = "float32"
    elif wide is not None:
        raise keys.unknown("moe_router_dtype", "float32", wide)
    return RouterConfig(
        num_experts=num_experts,
        top_k=top_k,
        has_correction_bias=bias and not hashed,
        **_groups(keys, family),
        **fields,
    )


def _groups(keys: Keys, family: Family) -> dict[str, Any]:
    grouped = family.groups
    if family.group_method is not None:
        keys.require_present(("topk_method",), "way to choose")
        grouped = keys.find(("topk_method",)) == family.group_method
    if not grouped:
        return {}
    keys.require_present(names.N_GROUP, "number of groups")
    n_group = keys.optional_count(names.N_GROUP, "number of groups")
    if n_group is None or not keys.flag(("use_grouped_topk",), True):
        return {}
    topk_group = keys.count(names.TOPK_GROUP, "number of groups a token may choose from")
    return {"n_group": n_group, "topk_group": topk_group}


def _activation(keys: Keys, family: Family, limit_keys: tuple[str, ...]) -> ActivationConfig:
    fixed = family.activation
    limit = keys.limit(limit_keys) if limit_keys else None
    clamp = family.clamp if limit is not None else None
    name = keys.find(family.activation_keys)
    if isinstance(name, Mapping):
        name = name.get("name")
    if fixed is None:
        keys.require_present(family.activation_keys, "activation")
    if name not in family.activations and not (fixed and name is None):
        known = " or ".join(map(repr, family.activations))
        raise keys.unknown(family.activation_keys[0], known, name)
    if fixed == "swiglu_oai":
        alpha = keys.number(("swiglu_alpha",)) or family.alpha
        if alpha is None:
            raise ValueError(f"{keys.model_type}: no gain of the gate: tried swiglu_alpha")
        return ActivationConfig("swiglu_oai", limit=limit, clamp=clamp, alpha=alpha)
    kind: ActivationKind = fixed or _KINDS[name]
    if kind == "situ":
        beta, linear_beta = (
            keys.number((key,)) for key in ("activation_situ_beta", "activation_situ_linear_beta")
        )
        if beta is None or linear_beta is None:
            raise ValueError(
                f"{keys.model_type}: activation 'situ' needs activation_situ_beta and "
                f"activation_situ_linear_beta, got {beta!r} and {linear_beta!r}"
            )
        return ActivationConfig("situ", beta=beta, linear_beta=linear_beta)
    return ActivationConfig(kind, is_gated=kind != "relu2", limit=limit, clamp=clamp)


def _shared(
    keys: Keys, family: Family, intermediate: int, quantization: str | None
) -> SharedExpertsConfig | None:
    count_keys = names.NUM_SHARED_ERNIE if family.shared == "count_ernie" else names.NUM_SHARED
    count = keys.optional_count(count_keys, "number of shared experts")
    width = keys.optional_count(family.shared_width, "width of the shared experts")
    if family.shared == "none":
        stray = keys.find(("shared_expert_intermediate_size",)) or count
        if stray:
            raise keys.unknown("shared experts", "none in this family", stray)
        return None
    if family.shared.startswith("count"):
        if count is None:
            return None
        each = width if width is not None and not family.shared_is_total else intermediate
        total = count * each
    elif family.shared == "expert_width":
        count, total = 1, intermediate
    elif width is None:
        return None
    else:
        count, total = count or 1, width
    return SharedExpertsConfig(
        count=count,
        intermediate_dim=total,
        is_gated=family.shared == "gated_width",
        activation=_activation(keys, family, family.shared_limit),
        quantization=quantization,
    )


def _refuse_unread_limits(keys: Keys, family: Family) -> None:
    """A clamp that is left out changes a model silently, so an unread one is refused."""
    read = {*family.limit, *family.shared_limit}
    if family.activation == "swiglu_oai":
        read.add("swiglu_alpha")
    for key, value in keys.values.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if _LIMIT.search(key) and key not in read and any(values):
            raise keys.unknown(key, "no such limit in this family", value)


def _check_layer(model_type: str, layers: tuple[int, ...] | None, layer_idx: int | None) -> None:
    if layer_idx is None or layers is None or layer_idx in layers:
        return
    raise ValueError(
        f"layer_idx: expected one of the MoE layers of {model_type}, {_ranges(layers)}; got "
        f"{layer_idx}, which is none"
    )


def _ranges(layers: tuple[int, ...]) -> str:
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def read(config: Mapping[str, Any] | Any, layer_idx: int | None) -> dict[str, Any]:
    """Return the fields of ``MoEConfig``; see its ``from_hf``."""
    outer = _as_dict(config)
    model_type, family, values = _find_family(outer)
    layers = moe_layers(values)
    hashed = hash_layers(values)
    _check_layer(model_type, layers, layer_idx)
    flat = values if family.inner is None else {**values, **_inner(values, family.inner)}
    keys = Keys(flat, model_type, layer_idx)
    _refuse_unread_limits(keys, family)
    num_experts = keys.count(names.NUM_EXPERTS, "number of experts")
    top_k = keys.count(names.TOP_K, "number of experts a token")
    hidden = keys.count(family.hidden, "hidden size")
    intermediate = keys.count(family.intermediate, "width of an expert")
    num_zero = keys.optional_count(family.zero_experts, "number of zero experts") or 0
    if num_zero:
        keys.expect(("zero_expert_type",), ("identity",))
    routed, shared = formats(values, outer, layer_idx or (layers[-1] if layers else 0))
    return {
        "model_type": model_type,
        "hidden_dim": hidden,
        "expert_hidden_dim": keys.optional_count(family.expert_hidden, "experts' hidden size")
        or hidden,
        "intermediate_dim": intermediate,
        "num_experts": num_experts,
        "num_zero_experts": num_zero,
        "top_k": top_k,
        "router": _router(keys, family, num_experts + num_zero, top_k, layer_idx in hashed),
        "activation": _activation(keys, family, family.limit),
        "shared_experts": _shared(keys, family, intermediate, shared),
        "dense_branch_dim": keys.optional_count(family.dense_branch, "width of the dense branch"),
        "quantization": routed,
        "moe_layers": layers,
        "hash_layers": hashed,
        "has_latent_norm": keys.flag(("latent_moe_use_norm",), False),
    }
