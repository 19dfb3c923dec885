# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The one ``torch.library.Library`` all ops are registered in, and when eager calls may pass it by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

NAMESPACE = "sgl_moe_jit"
library = torch.library.Library(NAMESPACE, "DEF")

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether calling a kernel directly does what the dispatcher would do.

    A tvm-ffi call drops gradients and ignores modes and subclasses silently, so the shortcut is
    taken only when nothing requires a gradient, nothing traces, no mode or functorch level is
    active and every tensor is a plain one.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN_TYPES or (grad and x.requires_grad)):
            return False
    return True
