# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a caller hands in, of the right kind: hidden states, tensors, modules, functions; a tracer.

No message of torch's about a step further in, and nothing has run or been sent before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError


def check_dense(name: str, x: object) -> None:
    """Refuse what is not a tensor, or one without rows and strides.

    Raises:
        TypeError: names the argument.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {kind}; convert it with .to_dense()")


def check_states(hidden_states: Tensor, hidden_dim: int = 0) -> None:
    """Refuse hidden states that are not floating [..., H].

    Args:
        hidden_states: What came.
        hidden_dim: H; 0 takes any.

    Raises:
        TypeError: not a dense tensor of a floating dtype.
        ValueError: no dimension, or another H.
    """
    check_dense("hidden_states", hidden_states)
    if not hidden_states.is_floating_point():
        raise TypeError(f"hidden_states: expected a floating dtype, got {hidden_states.dtype}")
    width = hidden_states.shape[-1] if hidden_states.dim() else 0
    if width < 1 or (hidden_dim and width != hidden_dim):
        raise ValueError(
            f"hidden_states: expected [..., {hidden_dim or 'hidden_dim'}], got "
            f"{tuple(hidden_states.shape)}"
        )


def rows_of(hidden_states: Tensor, hidden_dim: int = 0) -> Tensor:
    """Return hidden states [..., H] as [T, H]; arguments and errors of :func:`check_states`."""
    check_states(hidden_states, hidden_dim)
    return hidden_states.reshape(-1, hidden_states.shape[-1])


def refuse_jit_trace() -> None:
    """Refuse ``torch.jit.trace``, in which sizes are tensors, that no op here takes for a number.

    Raises:
        UnsupportedError: names it and the ways out.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UnsupportedError(
            "torch.jit.trace: expected torch.compile or torch.export around MoE layers and blocks "
            "of sgl_moe_jit, got torch.jit.trace, which knows no sizes; use one of them, or, of "
            "a transformers model, trace its own code: unfuse_shared_experts(model) and "
            "model.set_experts_implementation('eager') first"
        )


def check_module(name: str, x: object) -> None:
    """Refuse what is not a module: a class of modules, a list of them.

    Raises:
        TypeError: names the argument.
    """
    if not isinstance(x, torch.nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {described(x)}")


def check_callable(name: str, x: object, *, optional: bool = False) -> None:
    """Refuse what cannot be called, and a class, which would be made by the call.

    Raises:
        TypeError: names the argument.
    """
    if x is None and optional:
        return
    if not callable(x) or isinstance(x, type):
        kind = "a module or function" + (" or None" if optional else "")
        raise TypeError(f"{name}: expected {kind}, got {described(x)}")


def described(x: object) -> str:
    """Return what a wrong argument is, for a message."""
    return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__
