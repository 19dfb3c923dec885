# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Looking values up in a Hugging Face configuration: several names, one a layer, null for off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_moe_jit.errors import UnsupportedError

# Names in use for one thing. `top_k` is not among them: it is a sampling parameter.
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "experts_per_token",
)
NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
NUM_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
NUM_SHARED_ERNIE = ("moe_num_shared_experts",)
RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "norm_expert_weight")
SCALING = (
    "routed_scaling_factor",
    "moe_router_scaling_factor",
    "router_scaling_factor",
    "route_scale",
)
N_GROUP = ("n_group", "num_expert_group")
TOPK_GROUP = ("topk_group",)
SCORE_FUNCTION = (
    "scoring_func",
    "score_function",
    "moe_router_activation_func",
    "moe_router_activation",
)
HAS_BIAS = (
    "use_routing_bias",
    "use_moe_router_bias",
    "moe_router_enable_expert_bias",
    "use_expert_bias",
)


def wrong(name: str, expected: str, got: Any) -> ValueError:
    """Return the error for a value of another kind, or a missing one."""
    got = "none" if got is None else repr(got)
    return ValueError(f"{name}: expected {expected}, got {got}; see the checkpoint's config.json")


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return ``value``, if it is a mapping. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise wrong(name, "a mapping", value)
    return value


def integer(name: str, value: Any, least: int = 0) -> int:
    """Return ``value``, if it is an integer of ``least`` or more. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(name, f"an integer of {least} or more", value)
    return value


def integers(name: str, value: Any) -> list[int]:
    """Return a list's entries, if they are integers of 0 or more. Raises ValueError."""
    if not isinstance(value, (list, tuple)):
        raise wrong(name, "a list of integers", value)
    return [integer(name, entry) for entry in value]


def strings(name: str, value: Any) -> list[str]:
    """Return a list's entries, if they are strings. Raises ValueError."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
        raise wrong(name, "a list of strings", value)
    return list(value)


class Keys:
    """One configuration's keys, as seen from one layer.

    Args:
        values: The dictionary.
        model_type: For messages.
        layer_idx: Index into values that are lists; None: lists are refused.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str, layer_idx: int | None) -> None:
        self.values = values
        self.model_type = model_type
        self.layer_idx = layer_idx

    def _at_layer(self, name: str, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        if self.layer_idx is None:
            raise ValueError(
                f"{name}: a list of {len(value)}, one entry a layer; pass layer_idx to choose one"
            )
        if not 0 <= self.layer_idx < len(value):
            raise ValueError(
                f"layer_idx: expected 0 to {len(value) - 1}, the entries of {name}, got "
                f"{self.layer_idx}"
            )
        return value[self.layer_idx]

    def find(self, names: tuple[str, ...]) -> Any:
        """Return the value under the first name present, or None: absent or null.

        Raises:
            ValueError: two of the names hold different values.
        """
        found: dict[str, Any] = {}
        for name in names:
            value = self._at_layer(name, self.values.get(name))
            if value is not None:
                found[name] = value
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"{self.model_type}: keys contradict each other: {found}")
        return values[0] if values else None

    def is_present(self, names: tuple[str, ...]) -> bool:
        """Return whether one of the names is there, be it with null."""
        return any(name in self.values for name in names)

    def require_present(self, names: tuple[str, ...], meaning: str) -> None:
        """Check that one of the names is there; null will do.

        Raises:
            ValueError: names the keys tried.
        """
        if not self.is_present(names):
            raise ValueError(
                f"{self.model_type}: no {meaning}: tried {', '.join(names)}. A class's default is "
                "not a checkpoint's value: add the key"
            )

    def count(self, names: tuple[str, ...], meaning: str) -> int:
        """Return a size of 1 or more.

        Raises:
            ValueError: absent or null (names the keys tried), or not a positive integer.
        """
        value = self.find(names)
        if value is None:
            raise ValueError(f"{self.model_type}: no {meaning}: tried {', '.join(names)}")
        number = self.integer(value, meaning)
        if number < 1:
            raise ValueError(f"{self.model_type}: {meaning}: expected 1 or more, got {number}")
        return number

    def optional_count(self, names: tuple[str, ...], meaning: str) -> int | None:
        """Return a size, or None: absent, null or 0."""
        value = self.find(names)
        return (self.integer(value, meaning) or None) if value is not None else None

    def integer(self, value: Any, meaning: str) -> int:
        """Return ``value``, if it is an integer of 0 or more."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.model_type}: {meaning}: expected an integer, got {value!r}")
        return value

    def flag(self, names: tuple[str, ...], default: bool) -> bool:
        """Return a switch; ``default`` where it is absent or null."""
        value = self.find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{names[0]}: expected true or false, got {value!r}")
        return value

    def number(self, names: tuple[str, ...]) -> float | None:
        """Return a number; None where it is absent or null."""
        value = self.find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(names[0], "a number", value)
        return float(value)

    def factor(self, names: tuple[str, ...]) -> float:
        """Return a factor; 1.0 where it is absent, null or 0."""
        return self.number(names) or 1.0

    def limit(self, names: tuple[str, ...]) -> float | None:
        """Return a clamping limit; None where it is absent, null, 0, negative or infinite."""
        number = self.number(names)
        return number if number is not None and 0 < number < float("inf") else None

    def expect(self, names: tuple[str, ...], known: tuple[Any, ...]) -> None:
        """Check that the value, where there is one, is known.

        Raises:
            UnsupportedError: names key, known values and the one found.
        """
        value = self.find(names)
        if value is not None and value not in known:
            name = next(n for n in names if self.values.get(n) is not None)
            raise self.unknown(name, " or ".join(map(repr, known)), value)

    def unknown(self, name: str, expected: str, got: Any) -> UnsupportedError:
        """Return the error for an unknown value of a known key."""
        return UnsupportedError(f"{self.model_type}: {name}: expected {expected}, got {got!r}")
