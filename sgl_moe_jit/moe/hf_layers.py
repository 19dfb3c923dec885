# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are MoE layers: every family says it another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sgl_moe_jit.moe import hf_keys as keys

_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
Values = Mapping[str, Any]


def _integer(values: Values, name: str, default: int, least: int = 0) -> int:
    """Return a key's integer; ``default`` where it is absent or null."""
    value = values.get(name)
    return default if value is None else keys.integer(name, value, least)


def _flags(text: str) -> list[int]:
    """Read ``0,1,1``, ``[0, 1, 1]`` or ``([0]*1+[1]*2)``: one flag a layer."""
    flags: list[int] = []
    for term in text.replace(" ", "").strip("()").split("+"):
        match = re.fullmatch(r"\[?([01](?:,[01])*)\]?(?:\*(\d+))?", term)
        if match is None:
            raise ValueError(
                "moe_layer_freq: expected an integer, a list, or a string such as '0,1,1' or "
                f"'([0]*3+[1]*58)', got {text!r}"
            )
        flags += [int(flag) for flag in match[1].split(",")] * int(match[2] or 1)
    return flags


def _by_freq(values: Values, n: int) -> Iterable[int]:
    freq = values.get("moe_layer_freq", 1)
    if isinstance(freq, str):
        freq = int(freq) if freq.isdigit() and len(freq) < 3 else _flags(freq)
    if isinstance(freq, (list, tuple)):
        return [i for i, flag in enumerate(freq[:n]) if flag]
    freq = 1 if freq is None else keys.integer("moe_layer_freq", freq)
    first = _integer(values, "first_k_dense_replace", 0)
    return [i for i in range(first, n) if i % (freq or 1) == 0]


def _by_types(name: str, dense: tuple[str, ...]) -> Callable[[Values, int], Iterable[int]]:
    def read(values: Values, n: int) -> Iterable[int]:
        kinds = keys.strings(name, values[name])
        return [i for i, kind in enumerate(kinds[:n]) if kind not in dense]

    return read


def _by_enum(values: Values, n: int) -> Iterable[int]:
    listed = values["moe_layers_enum"]
    if isinstance(listed, str):
        items = [item.strip() for item in listed.split(",")]
        if not all(item.isdecimal() for item in items):
            raise keys.wrong("moe_layers_enum", "integers with commas between them", listed)
        listed = [int(item) for item in items]
    return [i for i in keys.integers("moe_layers_enum", listed) if i < n]


def _by_range(values: Values, n: int) -> Iterable[int]:
    last = _integer(values, "moe_layer_end_index", -1, least=-1)
    last = n - 1 if last == -1 else last
    step = _integer(values, "moe_layer_interval", 1) or 1
    start = _integer(values, "moe_layer_start_index", 0)
    return [i for i in range(n) if start <= i <= last and (i + 1) % step == 0]


def _by_step(values: Values, n: int) -> Iterable[int]:
    step = _integer(values, "decoder_sparse_step", 1) or 1
    dense = keys.integers("mlp_only_layers", values.get("mlp_only_layers") or ())
    return [i for i in range(n) if i not in dense and (i + 1) % step == 0]


def _by_interleave(values: Values, n: int) -> Iterable[int]:
    step = _integer(values, "interleave_moe_layer_step", 1, least=1)
    return range(step - 1, n, step)


def _by_pattern(name: str, moe: str) -> Callable[[Values, int], Iterable[int]]:
    def read(values: Values, n: int) -> Iterable[int]:
        pattern = values[name]
        kinds = pattern if isinstance(pattern, str) else keys.strings(name, pattern)
        return [i for i, kind in enumerate(kinds) if kind == moe]

    return read


# Key that tells, and how. A later key is asked when those before it are absent or null.
_WAYS: tuple[tuple[str, Callable[[Values, int], Iterable[int]]], ...] = (
    ("mlp_layer_types", _by_types("mlp_layer_types", ("dense",))),
    ("layers_block_type", _by_pattern("layers_block_type", "moe")),
    ("hybrid_override_pattern", _by_pattern("hybrid_override_pattern", "E")),
    ("moe_layers_enum", _by_enum),
    ("moe_layers", lambda values, n: keys.integers("moe_layers", values["moe_layers"])),
    ("interleave_moe_layer_step", _by_interleave),
    ("moe_layer_start_index", _by_range),
    ("first_k_dense_replace", _by_freq),
    ("moe_layer_freq", _by_freq),
    ("num_dense_layers", lambda values, n: range(_integer(values, "num_dense_layers", 0), n)),
    ("decoder_sparse_step", _by_step),
    ("mlp_only_layers", _by_step),
)


def moe_layers(values: Values) -> tuple[int, ...] | None:
    """Return the indices of the MoE layers, or None where the configuration does not tell."""
    counted = [(name, values[name]) for name in _NUM_LAYERS if values.get(name) is not None]
    n = keys.integer(*counted[0]) if counted else None
    for name, way in _WAYS:
        if values.get(name) is not None:
            if n is None and name not in ("layers_block_type", "hybrid_override_pattern"):
                return None
            return tuple(way(values, n or 0))
    return None


def hash_layers(values: Values) -> tuple[int, ...]:
    """Return the layers that take their experts from a table of token ids."""
    kinds = values.get("mlp_layer_types")
    if kinds is not None:
        kinds = keys.strings("mlp_layer_types", kinds)
        return tuple(i for i, kind in enumerate(kinds) if kind == "hash_moe")
    return tuple(range(_integer(values, "num_hash_layers", 0)))
