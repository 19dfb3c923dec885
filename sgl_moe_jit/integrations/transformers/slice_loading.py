# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One rank's experts of a transformers MoE block, with its shared experts as slots."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers.experts import activation_is_silu
from sgl_moe_jit.integrations.transformers.layer_loading import (
    describe,
    experts_of,
    refuse_hooks,
    shared_of,
)
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.loaders import register_loader
from sgl_moe_jit.moe.shared_slots import SharedMlp, take_slots

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MLP_NAMES = frozenset({*_PROJECTIONS, "act_fn"})


def _mlp_is_known(cls: Any) -> bool:
    """Whether a shared MLP's forward is ``down(act(gate(x)) * up(x))``: by names, and by a run."""
    code = getattr(cls.forward, "__code__", None)
    if code is None or set(code.co_names) != _MLP_NAMES or code.co_argcount != 2:
        return False
    x = torch.arange(1, 9, dtype=torch.float64, device="cpu").view(2, 4)
    stand_ins = SimpleNamespace(
        gate_proj=lambda v: v * 2 + 1, up_proj=lambda v: v * 3 - 1, act_fn=torch.sin
    )
    stand_ins.down_proj = lambda v: v * 5 - 2
    try:
        got = cls.forward(stand_ins, x)
        return bool(torch.equal(got, (torch.sin(x * 2 + 1) * (x * 3 - 1)) * 5 - 2))
    except Exception:  # of any kind: it asks its children for something else
        return False


def _matrix(mlp: torch.nn.Module, name: str) -> Tensor:
    layer: Any = getattr(mlp, name)  # the forward that is known has it
    is_plain = type(layer) is torch.nn.Linear
    if not is_plain or layer.bias is not None:
        raise UnsupportedError(
            f"{describe(mlp)}.{name}: expected a plain torch.nn.Linear without a bias, got "
            f"{'a bias' if is_plain else describe(layer)}; merge adapters first, or pass "
            "fuse_shared=False"
        )
    refuse_hooks(layer)
    if hasattr(layer, "parametrizations"):
        raise UnsupportedError(f"{describe(mlp)}.{name}: expected no parametrization")
    weight: Tensor = layer.weight
    return weight.detach()


def _shared_mlp(block: torch.nn.Module) -> SharedMlp:
    """Return the matrices of a block's shared experts.

    Raises:
        UnsupportedError: they cannot be expert slots; says why.
    """
    shared = shared_of(block)
    name, keep = describe(block), "; pass fuse_shared=False and call them beside the experts"
    if not shared:
        raise UnsupportedError(
            f"{name}: expected shared experts, got a block without; pass fuse_shared=False"
        )
    mlp = shared["shared_experts"]
    if "shared_expert_gate" in shared:
        raise UnsupportedError(
            f"{name}.shared_expert_gate: expected shared experts without a gate, since a slot's "
            f"weight is one number for all tokens, got a sigmoid gate on the input{keep}"
        )
    refuse_hooks(mlp)
    if not _mlp_is_known(type(mlp)):
        raise UnsupportedError(
            f"{describe(mlp)}.forward: expected down_proj(act_fn(gate_proj(x)) * up_proj(x)), got "
            f"another{keep}"
        )
    if not activation_is_silu(mlp):
        raise UnsupportedError(
            f"{describe(mlp)}.act_fn: expected SiLU without hooks, got {mlp.act_fn}{keep}"
        )
    return SharedMlp(*(_matrix(mlp, projection) for projection in _PROJECTIONS))


def load_slice(
    cls: type[FusedMoE],
    block: torch.nn.Module,
    ep_rank: int = 0,
    ep_size: int = 1,
    fuse_shared: bool = True,
    *,
    num_redundant: int = 0,
    physical_to_logical: Sequence[int] | None = None,
    **options: Any,
) -> FusedMoE:
    """Return one rank's slots; arguments and errors of :meth:`FusedMoE.from_transformers`."""
    shared_of(block)  # refuses a block that is not known
    refuse_hooks(block)
    weights = experts_of(cast("Any", block).experts)
    num_shared, mlp = 0, None
    if fuse_shared:
        mlp = _shared_mlp(block)
        try:
            num_shared = mlp.slots_of(weights)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{describe(block)}: {error}; pass fuse_shared=False") from None
    layout = EpLayout(weights.num_experts, num_redundant, ep_size, num_shared)
    layout.check_rank(ep_rank, "ep_rank")
    sources = layout.slot_sources(ep_rank, physical_to_logical)
    slots = take_slots(weights, sources[: layout.num_local_routed], mlp)
    return cls(slots, num_fused_shared_experts=num_shared, **options)


register_loader("transformers", load_slice)
