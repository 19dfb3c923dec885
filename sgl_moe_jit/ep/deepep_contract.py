# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a ``deep_ep.Buffer`` answers: a fork that answers otherwise is named at once."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError

KNOWN = "sgl-deep-ep 0.1.0 to 0.1.2.post1"


def broken(method: str, expected: str, got: object) -> NoReturn:
    """Raise UnsupportedError: the buffer's method answers in another form."""
    raise UnsupportedError(
        f"deep_ep.Buffer.{method}: expected {expected}, got {got}; this adapter knows the Buffer "
        f"of {KNOWN}"
    )


def parts_of(method: str, answer: object, count: int) -> tuple[Any, ...]:
    """Return an answer that is a tuple of ``count``."""
    if not isinstance(answer, tuple):
        broken(method, f"a tuple of {count}", type(answer).__name__)
    if len(answer) != count:
        broken(method, f"a tuple of {count}", f"one of {len(answer)}")
    return answer


def tensor_of(
    method: str, what: str, x: object, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> Tensor:
    """Return a part that is a tensor of a dtype and shape; None in ``shape``: any size."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    expected = f"{what} [{sizes}] of {dtype}"
    if not isinstance(x, Tensor):
        broken(method, expected, type(x).__name__)
    fits = x.dim() == len(shape) and all(
        size in (None, got) for size, got in zip(shape, x.shape, strict=True)
    )
    if not fits or x.dtype != dtype:
        broken(method, expected, f"{list(x.shape)} of {x.dtype}")
    return x
