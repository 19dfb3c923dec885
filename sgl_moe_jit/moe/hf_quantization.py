# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The formats that routed and shared experts are stored in, as a configuration states them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from sgl_moe_jit.moe.hf_keys import integers, mapping, strings, wrong

Quantization = Mapping[str, Any]

# Checkpoints spell one module in several ways; a list of modules is asked for each of them.
_PREFIXES = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "backbone.layers",
    "layers",
)
_BLOCKS = ("mlp", "ffn", "block_sparse_moe", "mixer", "feed_forward")
_PROJECTIONS = ("down_proj", "w2")
_ROUTED = ("experts.0", "experts")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
# Lists of what is left out, in the words of the tools that write them.
_EXCLUDED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")


def _spellings(experts: Iterable[str], layer_idx: int) -> list[str]:
    return [
        f"{prefix}.{layer_idx}.{block}.{name}.{projection}"
        for name in experts
        for prefix in _PREFIXES
        for block in _BLOCKS
        for projection in _PROJECTIONS
    ]


def _matches(pattern: str, name: str) -> bool:
    """``re:`` expressions from the start, globs on the whole, else whole parts of the path."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def _any_matches(patterns: Iterable[str], spellings: Iterable[str]) -> bool:
    return any(_matches(pattern, name) for pattern in patterns for name in spellings)


def _with_group(name: str, settings: Quantization) -> str:
    group = settings.get("group_size")
    return f"{name} g{group}" if group else name


def _modelopt(settings: Quantization) -> str:
    if settings.get("quant_algo") is None:
        raise wrong("quant_algo", "the name of an algorithm", None)
    name = str(settings["quant_algo"]).lower()
    return _with_group(name, {"group_size": 16 if name == "nvfp4" else None, **settings})


def _compressed_tensors(quantization: Quantization, spellings: list[str]) -> str | None:
    """Return the format of the first group whose targets take in the module."""
    for key, group in mapping("config_groups", quantization["config_groups"]).items():
        where = f"config_groups.{key}"
        group = mapping(where, group)
        targets = strings(f"{where}.targets", group.get("targets") or ["Linear"])
        if "Linear" not in targets and not _any_matches(targets, spellings):
            continue
        weights = mapping(f"{where}.weights", group.get("weights"))
        written = str(group.get("format") or quantization.get("format") or "")
        name = written.removesuffix("-pack-quantized")
        if name not in ("mxfp4", "nvfp4"):
            for needed in ("type", "num_bits"):
                if weights.get(needed) is None:
                    raise wrong(f"{where}.weights.{needed}", "a value", None)
            name = f"{weights['type']}{weights['num_bits']}"
        block = weights.get("block_structure")
        if block:
            return f"{name} {_size(f'{where}.weights.block_structure', block)}"
        if (name, weights.get("strategy")) == ("float8", "channel"):
            activations = mapping(
                f"{where}.input_activations", group.get("input_activations") or {}
            )
            return _per_channel(activations)
        return _with_group(name, weights)
    return None


def _per_channel(activations: Quantization) -> str:
    """Name FP8 with a scale an output row; activations by token as they come go without saying."""
    name = "fp8 e4m3 channel"
    if not activations:
        return f"{name}, weights only"
    if activations.get("dynamic") is True and activations.get("strategy") == "token":
        return name
    return f"{name}, activations not by token"


def _size(name: str, block: Any) -> str:
    return "x".join(map(str, integers(name, block)))


def _listed(quantization: Quantization, spellings: list[str]) -> str | None:
    """Return the format that a list of modules, each with its own algorithm, gives the module."""
    layers = mapping("quantized_layers", quantization["quantized_layers"])
    for listed, settings in layers.items():
        if any(_matches(listed, name) for name in spellings):
            return _modelopt(mapping(f"quantized_layers.{listed}", settings))
    return None


def _whole_model(quantization: Quantization) -> str:
    """Return the format of every module that is not left out."""
    method = str(quantization.get("quant_method"))
    if method == "fp8":
        kind = str(quantization.get("fmt") or "e4m3").removeprefix("float8_").removesuffix("fn")
        block = quantization.get("weight_block_size")
        return f"fp8 {kind} {_size('weight_block_size', block)}" if block else f"fp8 {kind}"
    if method == "mxfp4":
        return "mxfp4 g32"
    bits = quantization.get("bits")
    return _with_group(f"{method} int{bits}" if bits else method, quantization)


def _format(
    quantization: Quantization, spellings: list[str], expert_dtype: str | None
) -> str | None:
    excluded = (
        pattern for key in _EXCLUDED for pattern in strings(key, quantization.get(key) or [])
    )
    if _any_matches(excluded, spellings):
        return None
    if quantization.get("quantized_layers"):
        return _listed(quantization, spellings)
    if quantization.get("quant_algo"):
        return _modelopt(quantization)
    if quantization.get("config_groups"):
        return _compressed_tensors(quantization, spellings)
    return expert_dtype or _whole_model(quantization)


def formats(
    values: Mapping[str, Any], outer: Mapping[str, Any], layer_idx: int
) -> tuple[str | None, str | None]:
    """Return the formats of routed and of shared experts; None: not quantized.

    A format is named by its element type and its blocks or groups: ``fp8 e4m3 128x128``,
    ``nvfp4 g16``, ``int4 g32``, ``fp8 e4m3 channel``. Methods not known here keep their own name.

    Args:
        values: The text model's dictionary.
        outer: The whole dictionary, which may hold ``quantization_config`` instead.
        layer_idx: Layer to ask for where modules are listed one by one.
    """
    quantization = values.get("quantization_config") or outer.get("quantization_config") or {}
    quantization = mapping("quantization_config", quantization)
    expert_dtype = values.get("expert_dtype") or quantization.get("expert_dtype")
    if not quantization:
        return expert_dtype, None
    return (
        _format(quantization, _spellings(_ROUTED, layer_idx), expert_dtype),
        _format(quantization, _spellings(_SHARED, layer_idx), None),
    )
