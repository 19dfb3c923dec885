# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What ``moe_finalize_fuse_shared`` checks in Python: kinds of arguments, the output's shape."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def is_int(x: object) -> bool:
    """Whether it is an int, perhaps a traced one, and no bool."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_int(name: str, x: object, expected: str) -> None:
    """Check that an int fits into the 64 bits that C++ and the schemas have for it.

    Ranges are checked in C++, which such a number does not reach.

    Raises:
        TypeError: not an int.
        ValueError: it does not fit.
    """
    if not is_int(x):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if type(x) is int and not -(2**63) <= x < 2**63:
        # Not the number itself: Python refuses to write out more than some 4300 digits.
        bits = (x if x >= 0 else ~x).bit_length() + 1  # with its sign
        raise ValueError(f"{name}: expected {expected}, got an int of {bits} bits")


def check_kinds(
    gemm2_out: object,
    expanded_idx_to_permuted_idx: object,
    expert_weights: object,
    shared_output: object,
    shared_gate_logits: object,
    top_k: object,
    enable_pdl: object,
    routed_scaling_factor: object,
    hidden_dim: object,
) -> None:
    """Check that each argument is of its kind, which neither C++ nor the schema would name.

    Raises:
        TypeError: names the argument, what was expected and what came.
        ValueError: an int is too large to reach the check of its range.
    """

    def fail(name: str, expected: str, got: object) -> NoReturn:
        raise TypeError(f"{name}: expected {expected}, got {type(got).__name__}")

    if not isinstance(gemm2_out, Tensor):
        fail("gemm2_out", "a Tensor", gemm2_out)
    if not isinstance(expanded_idx_to_permuted_idx, Tensor):
        fail("expanded_idx_to_permuted_idx", "a Tensor", expanded_idx_to_permuted_idx)
    for name, x in (
        ("expert_weights", expert_weights),
        ("shared_output", shared_output),
        ("shared_gate_logits", shared_gate_logits),
    ):
        if not (x is None or isinstance(x, Tensor)):
            fail(name, "a Tensor or None", x)
    check_int("top_k", top_k, "1 to 64")
    if not (enable_pdl is None or isinstance(enable_pdl, bool)):
        fail("enable_pdl", "True, False or None", enable_pdl)
    check_factor(routed_scaling_factor)
    if not (hidden_dim is None or is_int(hidden_dim)):
        fail("hidden_dim", "an int or None", hidden_dim)
    if hidden_dim is not None:
        check_int("hidden_dim", hidden_dim, "at most the width of gemm2_out")


def check_factor(routed_scaling_factor: object) -> None:
    """Check that the factor is a number. A tensor's gradient would be lost.

    Raises:
        TypeError: it is not.
        ValueError: an int beyond 64 bits, which C++ would not take for a float.
    """
    factor = routed_scaling_factor
    if not (isinstance(factor, (float, torch.SymFloat)) or is_int(factor)):
        raise TypeError(
            f"routed_scaling_factor: expected a float, got {type(factor).__name__}; fold a tensor "
            "into expert_weights"
        )
    if is_int(factor):
        check_int("routed_scaling_factor", factor, "a float, or an int of at most 64 bits")


def output_width(gemm2_out: Tensor, shared_output: Tensor | None, hidden_dim: int | None) -> int:
    """Return H, from whichever argument tells it."""
    if shared_output is not None:
        width = shared_output.shape[-1] if shared_output.dim() else 0
        if hidden_dim is not None and hidden_dim != width:
            raise ValueError(
                f"hidden_dim: expected {width}, the width of shared_output, got {hidden_dim}"
            )
        return width
    padded = gemm2_out.shape[-1] if gemm2_out.dim() else 0
    if hidden_dim is None:
        return padded
    if not 1 <= hidden_dim <= padded:
        raise ValueError(
            f"hidden_dim: expected 1 to {padded}, the width of gemm2_out, got {hidden_dim}"
        )
    return hidden_dim


def num_tokens_of(
    expanded_idx_to_permuted_idx: Tensor, expert_weights: Tensor | None, top_k: int
) -> int:
    """Return T, from the weights where there are any, else from the indices."""
    if expert_weights is not None:
        return expert_weights.shape[0] if expert_weights.dim() else 0
    idx = expanded_idx_to_permuted_idx
    # a top_k out of range is for C++ to name
    return idx.shape[0] if idx.dim() == 2 else idx.numel() // max(top_k, 1)


def check_devices(gemm2_out: Tensor, **others: Tensor | None) -> None:
    """Check that all lie on one device, where no kernel is there to do it.

    Raises:
        ValueError: names the first that does not.
    """
    for name, x in others.items():
        if x is not None and x.device != gemm2_out.device:
            raise ValueError(
                f"{name}: expected device {gemm2_out.device} like gemm2_out, got {x.device}; "
                "move it with .to()"
            )
