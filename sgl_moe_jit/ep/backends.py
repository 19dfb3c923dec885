# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which ways of moving tokens between ranks know expert slots, as data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class DispatchBackend:
    """What one backend means for shared experts as slots.

    Attributes:
        is_deepep_class: Whether it does as DeepEP: sends a token's (id, weight) pairs to the ranks
            that own the ids, in rank-major blocks of slots, and skips ids below 0.
        has_rank_slots: Whether each rank may have shared slots of its own.
        is_all_reduce: Whether every rank sees every token and the outputs are summed.
    """

    is_deepep_class: bool = False
    has_rank_slots: bool = False
    is_all_reduce: bool = False


_DEEPEP_CLASS = DispatchBackend(is_deepep_class=True, has_rank_slots=True)

BACKENDS = MappingProxyType(
    {
        "none": DispatchBackend(is_all_reduce=True),
        "torch": _DEEPEP_CLASS,  # torch.distributed
        "deepep": _DEEPEP_CLASS,
        "deepep_v2": _DEEPEP_CLASS,
        "mooncake": _DEEPEP_CLASS,
        "mori": _DEEPEP_CLASS,
        "pplx": _DEEPEP_CLASS,
        "megamoe": DispatchBackend(has_rank_slots=True),
        "flashinfer": DispatchBackend(),
    }
)
"""By name; sglang's names, and ``torch``."""


def dispatch_backend(name: str) -> DispatchBackend:
    """Return what is known of a backend.

    Raises:
        ValueError: nothing is; lists the names.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]


def is_deepep_class_backend(name: str) -> bool:
    """Return whether a backend dispatches as DeepEP does: see :class:`DispatchBackend`.

    Raises:
        ValueError: the backend is not known.
    """
    return dispatch_backend(name).is_deepep_class
