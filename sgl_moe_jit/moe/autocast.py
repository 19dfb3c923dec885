# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""GEMMs and autocast: where it is on, and how to keep a GEMM's own dtype."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast_on(device_type: str) -> bool:
    """Return whether torch converts arguments on such a device."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which torch converts no argument on such a device."""
    if is_autocast_on(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
