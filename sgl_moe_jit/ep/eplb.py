# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""For a balancer that moves routed experts between ranks: their weights, and the table of replicas.

Shared experts stay where they are. They stand in the last slots of each rank, so the weights that
move are a prefix; and they have no line in the table, whose ids are those of routed experts.
Order of a call: route, replace ids by :func:`to_physical`, count
(:class:`sgl_moe_jit.ep.expert_counts.ExpertCounts`), then append shared columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout, check_layout, may_read
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.input_checks import described
from sgl_moe_jit.moe.topk_selection import padded_rows
from sgl_moe_jit.ops.finalize_arguments import check_int

_INTEGERS = (torch.int32, torch.int64)
_GLOBAL = "holds_global_experts"
# The second name is sglang's, for layers of its own.
_GLOBAL_MARKS = (_GLOBAL, "_sglang_require_global_experts")


def mark_global_experts(tensor: Tensor) -> Tensor:
    """Mark a parameter as one that every rank holds for the experts of all ranks, and return it.

    Its length may happen to be that of a rank's slots; it does not move with them. The mark is an
    attribute: ``.to`` and pickling keep it, ``copy.deepcopy`` of a parameter drops it, as torch
    drops all attributes there. Mark the copy again.

    Raises:
        TypeError: not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a Tensor, got {described(tensor)}")
    setattr(tensor, _GLOBAL, True)
    return tensor


def get_moe_weights(experts: torch.nn.Module, layout: EpLayout | None = None) -> list[Tensor]:
    """Return a rank's routed slots of every parameter that is indexed by them, for moving experts.

    Those are the module's own parameters with one entry a slot: matrices, scales, biases inside the
    experts. Left out are parameters marked by :func:`mark_global_experts`, and one-dimensional
    biases: one number an expert is the router's (``e_score_correction_bias``), which stays.

    Args:
        experts: A ``FusedMoE``; or a module with ``num_local_experts``, B, which counts shared
            slots, and ``num_fused_shared_experts``, S (none: 0).
        layout: Checked against the module when given.

    Returns:
        Views of the first B - S entries, in order of registration: writing to one writes to the
        parameter, and the shared slots behind them are out of reach.

    Raises:
        TypeError: ``experts`` is no such module.
        ValueError: there is no routed slot, no such parameter, or another number than the layout's.
        UnsupportedError: a parameter is parametrized (an adapter): what is written to a view of
            the computed weight would be lost.
    """
    name = type(experts).__name__
    if not isinstance(experts, torch.nn.Module) or not hasattr(experts, "num_local_experts"):
        raise TypeError(f"experts: expected a module with num_local_experts, got {name}")
    num_slots = int(experts.num_local_experts)  # type: ignore[arg-type]
    num_shared = int(getattr(experts, "num_fused_shared_experts", 0))
    num_routed = num_slots - num_shared
    if num_shared < 0 or num_routed < 1:
        raise ValueError(
            f"{name}: expected at least one routed slot beside the shared ones, got "
            f"num_local_experts={num_slots}, num_fused_shared_experts={num_shared}"
        )
    if layout is not None and (num_routed, num_shared) != (
        layout.num_local_routed,
        layout.num_shared,
    ):
        raise ValueError(
            f"{name}: expected {layout.num_local_routed} routed and {layout.num_shared} shared "
            f"slots as the layout has, got {num_routed} and {num_shared}"
        )
    if hasattr(experts, "parametrizations"):
        raise UnsupportedError(
            f"{name}: expected plain parameters, got parametrized ones; merge adapters first"
        )
    views = [
        parameter.detach()[:num_routed]
        for key, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 0
        and parameter.shape[0] == num_slots
        and not (parameter.dim() == 1 and key.endswith("bias"))
        and not any(getattr(parameter, mark, False) for mark in _GLOBAL_MARKS)
    ]
    if not views:
        raise ValueError(f"{name}: expected parameters with {num_slots} entries, one a slot")
    return views


def logical_to_physical_table(
    layout: EpLayout, physical_to_logical: Sequence[int] | None = None
) -> Tensor:
    """Return where each routed expert stands: [num_experts, R] int64, -1 behind its last replica.

    Args:
        layout: The layout. R is the largest number of replicas.
        physical_to_logical: The expert in each physical slot; see :meth:`EpLayout.slot_sources`.

    Raises:
        ValueError: see :meth:`EpLayout.slot_sources`.
    """
    check_layout(layout)
    places: list[list[int]] = [[] for _ in range(layout.num_experts)]
    slot = 0
    for rank in range(layout.ep_size):
        sources = layout.slot_sources(rank, physical_to_logical)
        for expert in sources[: layout.num_local_routed]:
            places[expert].append(slot)
            slot += 1
    longest = max(map(len, places))
    return torch.tensor([line + [-1] * (longest - len(line)) for line in places])


def to_physical(
    topk_ids: Tensor,
    table: Tensor,
    *,
    num_shared_columns: int = 0,
    num_token_non_padded: Tensor | int | None = None,
    first_token: int = 0,
) -> Tensor:
    """Replace logical expert ids by those of physical slots.

    Token t takes replica ``(first_token + t) mod n`` of an expert with n of them: a rule without
    randomness, so that ranks that see the same token choose the same replica.

    Args:
        topk_ids: [N, K + C] int32 or int64, the last C columns of shared experts. Below 0: no
            expert, kept as it is.
        table: [num_experts, R] or [num_experts], int32 or int64: :func:`logical_to_physical_table`.
        num_shared_columns: C. They never index the table and come back as they are.
        num_token_non_padded: Rows from here on are padding and come back as -1 throughout, shared
            columns included: an int, or one integer on the ids' device, so that a captured graph
            sees it change. None: no padding. The mask is applied to what the table gave, since -1
            as an index would read its last line.
        first_token: Number of row 0 among the tokens that the ranks agree on.

    Returns:
        [N, K + C], dtype of ``topk_ids``, a new tensor.

    Raises:
        TypeError: a dtype or a kind is another.
        ValueError: shapes do not fit; or an id is no expert of the table, or an expert's replicas
            do not fill its first columns: always for CPU tensors, for CUDA tensors with
            ``SGL_MOE_JIT_CHECK_INDICES=1``, and else torch's device-side assertion for the former
            and -1 for the latter.

    Source: splitting the shared columns off first, and masking last, is what sglang came to.
    """
    for name, x in (("topk_ids", topk_ids), ("table", table)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(x).__name__}")
    check_int("num_shared_columns", num_shared_columns, "0 to K")
    check_int("first_token", first_token, "an int of at most 64 bits")
    if topk_ids.dtype not in _INTEGERS or table.dtype not in _INTEGERS:
        raise TypeError(
            f"topk_ids, table: expected int32 or int64, got {topk_ids.dtype} and {table.dtype}"
        )
    if topk_ids.dim() != 2 or not 0 <= num_shared_columns < topk_ids.shape[1]:
        raise ValueError(
            "topk_ids: expected [N, K + num_shared_columns] with K >= 1, got "
            f"{tuple(topk_ids.shape)} and num_shared_columns={num_shared_columns}"
        )
    if table.dim() not in (1, 2) or 0 in table.shape:
        raise ValueError(f"table: expected [num_experts, replicas], got {tuple(table.shape)}")
    if table.device != topk_ids.device:
        raise ValueError(
            f"table: expected it on {topk_ids.device} like topk_ids, got {table.device}; move it "
            "once, with .to"
        )
    num_routed = topk_ids.shape[1] - num_shared_columns
    logical, shared = topk_ids[:, :num_routed], topk_ids[:, num_routed:]
    lines = table.reshape(table.shape[0], -1)
    if logical.numel() and may_read(topk_ids):
        if int(logical.max()) >= table.shape[0]:
            raise ValueError(
                f"topk_ids: expected routed ids below {table.shape[0]}, the table's length, got "
                f"{int(logical.max())}; name columns of shared experts with num_shared_columns"
            )
        # -1 only behind the replicas: the rule below takes as many columns as there are replicas.
        gap = bool(((lines[:, :-1] < 0) & (lines[:, 1:] >= 0)).any())
        if gap or int(lines[:, 0].min()) < 0:
            raise ValueError(
                "table: expected the replicas of each expert, at least one, from column 0 on, and "
                "-1 behind them"
            )
        if int(lines.max()) > torch.iinfo(topk_ids.dtype).max:
            raise ValueError(
                f"table: expected slots that {topk_ids.dtype} ids can name, got {int(lines.max())}"
            )
    rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)[:, None]
    known = logical.clamp(min=0).long()
    replica = (rows + first_token) % (lines >= 0).sum(1).clamp(min=1)[known]
    physical = lines[known, replica].to(topk_ids.dtype)
    ids = torch.cat([torch.where(logical < 0, logical, physical), shared], 1)
    if num_token_non_padded is None:
        return ids
    return ids.masked_fill(padded_rows(ids, num_token_non_padded, "topk_ids"), -1)
