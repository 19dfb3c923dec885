# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Modules under a hook of accelerate, as ``device_map`` places them.

Such a hook sits in a ``forward`` on the instance, which moves the inputs (and, offloading, the
weights), calls ``module._old_forward`` and lets ``module._hf_hook`` look at the output.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch


def forward_is_own(module: torch.nn.Module) -> bool:
    """Whether a module's call ends in the forward of its class, possibly behind such a hook."""
    own = module.__dict__
    if "forward" not in own:
        return True
    old = own.get("_old_forward")
    return (
        "_hf_hook" in own
        and isinstance(old, MethodType)
        and old.__self__ is module
        and old.__func__ is type(module).forward
    )


def stands_around(module: torch.nn.Module) -> str:
    """Return what such a hook does to a call besides placing it on a device; empty: nothing.

    One that offloads loads the weights for the length of the call. Of any other kind nothing is
    known, so it gets the stock arguments and a tensor.
    """
    hook: Any = module.__dict__.get("_hf_hook")
    if hook is None:
        return ""
    kind = type(hook).__name__
    if kind != "AlignDevicesHook" or hook.io_same_device:
        return f"accelerate's {kind} stands around them"
    if hook.offload:
        return "an offloading hook loads their weights for the length of their call"
    return ""


def change_class(module: torch.nn.Module, cls: type[torch.nn.Module]) -> None:
    """Give a module another class, also behind such a hook."""
    behind = "forward" in module.__dict__
    module.__class__ = cls
    if behind:
        module.__dict__["_old_forward"] = MethodType(cls.forward, module)
