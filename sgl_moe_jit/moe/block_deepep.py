# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A block's call under expert parallelism: gate, pad mask, expand, dispatch, experts, combine.

Each rank brings its own tokens and gets their whole output back; nothing is reduced afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe import block_facts as find
from sgl_moe_jit.moe.block_finish import SharedOutput, finish
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from sgl_moe_jit.moe.dispatch import DispatchedRows, ExpertParallelPath, SharedExpander
from sgl_moe_jit.moe.input_checks import rows_of
from sgl_moe_jit.moe.layer_base import MoELayer
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.runners.base import as_standard
from sgl_moe_jit.moe.topk import StandardTopKOutput, TopKFormat
from sgl_moe_jit.moe.topk_selection import padded_rows
from sgl_moe_jit.ops.finalize_arguments import is_int


def check_path(experts: Any, shared_is_fused: bool, path: ExpertParallelPath) -> None:
    """Refuse parts that do not belong together, before any token is sent.

    Raises:
        TypeError: ``experts`` are not a layer of this library.
        ValueError: the expander does not go with the block, or the experts are not as many as the
            dispatcher sends to, or they reduce by themselves.
        UnsupportedError: the dispatcher wants un-finalized rows, and the runner has none.
    """
    if not isinstance(experts, MoELayer):
        raise TypeError(
            f"experts: expected a FusedMoE or PreparedMoE, got {type(experts).__name__}; only they "
            "say how many experts this rank holds"
        )
    if shared_is_fused != (path.expand is not None):
        have, expected = ("no ", "one") if shared_is_fused else ("an ", "None")
        raise ValueError(
            f"expand: expected {expected}, since the block was made with "
            f"shared_is_fused={shared_is_fused}, got {have}expander"
        )
    wanted = path.dispatcher.num_local_experts
    # Of an expander that says what it numbers for; ids of another layout would go to wrong experts.
    slots = getattr(getattr(path.expand, "layout", None), "num_local", wanted)
    if slots != wanted:
        raise ValueError(
            f"expand: expected a layout of {wanted} slots a rank, as many as the dispatcher sends "
            f"to, got {slots}"
        )
    if experts.num_local_experts != wanted:
        raise ValueError(
            f"experts: expected {wanted} on this rank, as many as the dispatcher sends to, shared "
            f"slots included, got {experts.num_local_experts}"
        )
    if experts.reduce_results or experts.groups.size > 1:
        raise ValueError(
            f"experts: expected no group to reduce over, got {experts.groups}: the combine returns "
            "whole results; make the layer without tp_group and ep_group"
        )
    if path.dispatcher.takes_deferred:
        support = experts.supports_deferred_finalize(TopKFormat.STANDARD)
        if not support.ok:
            raise UnsupportedError(
                f"dispatcher: wants un-finalized rows, and {support.why}; use one that takes sums, "
                "such as TorchDispatcher(..., sum_at='experts')"
            )


def _choice(
    topk: StandardTopKOutput, path: ExpertParallelPath, num_token_non_padded: Tensor | int | None
) -> tuple[Tensor, Tensor]:
    """Return physical ids and float32 weights [T, K], padded rows without an expert; record them.

    The mask comes after the table: a table read at -1 gives its last entry.
    """
    if topk.weight_on_input:
        raise ValueError("topk_output: expected weights on the experts' output, not on their input")
    ids, weights = topk.topk_ids, topk.topk_weights.float()
    if path.to_physical is not None:
        ids = torch.where(ids < 0, ids, path.to_physical(ids.clamp(min=0)).to(ids.dtype))
    if num_token_non_padded is not None:
        padded = padded_rows(ids, num_token_non_padded, "the ids")
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    if path.record is not None:
        path.record(ids)
    return ids, weights


def _shared_weight(factor: float) -> float:
    """Return the weight with which a shared column comes out of a later factor as 1."""
    if factor == 0:
        raise ValueError(
            "routed_scaling_factor: expected other than 0 where shared experts are fused, since it "
            "multiplies their output too, got 0"
        )
    return 1.0 / factor


def _run_experts(
    experts: MoELayer, rows: DispatchedRows, takes_deferred: bool
) -> Tensor | DeferredFinalizeOutput:
    topk = rows.topk_output
    if experts.expert_range is not None and experts.expert_range.first:
        # The layer counts from its first expert, and so undoes this.
        ids = topk.topk_ids
        topk = replace(topk, topk_ids=torch.where(ids < 0, ids, ids + experts.expert_range.first))
    return experts(rows.hidden_states, topk, defer=takes_deferred)  # type: ignore[no-any-return]


def _device_of(block: Any, hidden_states: Any) -> torch.device:
    if isinstance(hidden_states, Tensor):
        return hidden_states.device
    return next((p.device for p in block.parameters()), torch.device("cpu"))


def _top_k_of(gate: Any) -> int | None:
    """Return K of a gate that says it, before it is asked."""
    config = getattr(gate, "config", None)
    top_k = getattr(config if isinstance(config, RouterConfig) else gate, "top_k", None)
    return top_k if is_int(top_k) else None


def run(
    block: Any,
    hidden_states: Tensor,
    path: ExpertParallelPath,
    num_token_non_padded: Tensor | int | None,
) -> Tensor:
    """Do the work of ``SharedExpertMoEBlock.forward_deepep``; see there."""
    if not isinstance(path, ExpertParallelPath):  # nor is there anyone to tell the other ranks
        raise TypeError(f"path: expected an ExpertParallelPath, got {type(path).__name__}")
    # Until it is called, the others may be in a collective of its own.
    waited_for: SharedExpander | None = path.expand
    top_k: int | None = None
    try:
        check_path(block.experts, block.shared_is_fused, path)
        x = find.adjacent_columns(rows_of(hidden_states, block.experts.hidden_dim))
        if find.needs_grad(block, x):
            raise RuntimeError(
                "hidden_states: expected no gradient, since a dispatch does not carry it; call "
                "under torch.no_grad()"
            )
        topk = as_standard(block._route(x))
        top_k = find.top_k_of(topk)
        factor = float(topk.routed_scaling_factor)
        ids, weights = _choice(topk, path, num_token_non_padded)
        if path.expand is not None:
            shared_weight = _shared_weight(factor)
            waited_for = None
            ids, weights = path.expand(ids, weights, shared_weight)
    except Exception:
        # It may be this rank's alone, and the others are in their expander or their dispatch.
        device = _device_of(block, hidden_states)
        stop = getattr(waited_for, "stop", None)
        if stop is None or stop(device, _top_k_of(block.gate) if top_k is None else top_k):
            path.dispatcher.stop(device)
        raise
    rows = path.dispatcher.dispatch(x, ids, weights)
    output = _run_experts(block.experts, rows, path.dispatcher.takes_deferred)
    returned = path.dispatcher.combine(output, rows)
    assert returned.routed_scaling_factor == 1.0, returned.routed_scaling_factor
    returned = replace(returned, routed_scaling_factor=factor)
    shared: SharedOutput | None = None
    if not block.shared_is_fused and block.shared_experts is not None and x.shape[0]:
        shared = block._shared(x)
    assert shared is None or path.expand is None, "the shared experts would be counted twice"
    y = finish(returned, shared, x, reduce_over=None, add_late=False)
    return y.reshape(hidden_states.shape)
