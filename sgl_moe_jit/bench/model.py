# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations an op cannot avoid: what measured times are held against."""

from __future__ import annotations


def finalize_bytes(
    num_tokens: int,
    top_k: int,
    hidden_dim: int,
    activation_bytes: int,
    weight_bytes: int,
    has_shared: bool = True,
    rows_present: int | None = None,
) -> int:
    """Return the bytes of one finalize: each input read once, the output written once.

    Args:
        num_tokens: T.
        top_k: K.
        hidden_dim: H.
        activation_bytes: Item size of rows, shared and output.
        weight_bytes: Item size of the weights.
        has_shared: Whether a shared row is read.
        rows_present: Slots with a row, over all tokens; None means all T * K.
    """
    rows = num_tokens * top_k if rows_present is None else rows_present
    wide_rows = rows + num_tokens * (1 + int(has_shared))
    return wide_rows * hidden_dim * activation_bytes + num_tokens * top_k * (4 + weight_bytes)


def separate_finalize_bytes(
    num_tokens: int, top_k: int, hidden_dim: int, activation_bytes: int, weight_bytes: int
) -> int:
    """Return the bytes of a finalize, then an add: the routed sum travels twice more."""
    alone = finalize_bytes(
        num_tokens, top_k, hidden_dim, activation_bytes, weight_bytes, has_shared=False
    )
    return alone + 3 * num_tokens * hidden_dim * activation_bytes


def finalize_flops(num_tokens: int, top_k: int, hidden_dim: int, has_shared: bool = True) -> int:
    """Return the floating-point operations of one finalize, every row present."""
    return num_tokens * hidden_dim * (2 * top_k + int(has_shared))


def norm_bytes(
    num_tokens: int, top_k: int, hidden_dim: int, activation_bytes: int, weight_bytes: int
) -> int:
    """Return the bytes of one finalize with residual add and RMSNorm.

    A finalize's, and a token's residual read, its sum written, and the norm's weights read once.
    """
    alone = finalize_bytes(num_tokens, top_k, hidden_dim, activation_bytes, weight_bytes)
    return alone + (2 * num_tokens + 1) * hidden_dim * activation_bytes


def permute_bytes(
    num_tokens: int, top_k: int, hidden_dim: int, activation_bytes: int, id_bytes: int
) -> int:
    """Return the bytes of one permutation: rows read once, written K times; ids in, rows out."""
    rows = num_tokens * (1 + top_k) * hidden_dim * activation_bytes
    return rows + num_tokens * top_k * (id_bytes + 4)


def expand_bytes(num_tokens: int, top_k: int, id_bytes: int, weight_bytes: int) -> int:
    """Return the bytes of one expansion: ids and weights [N, K] in, [N, K + 1] out."""
    return num_tokens * (2 * top_k + 1) * (id_bytes + weight_bytes)
