# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of transformers models whose shared-expert add rides along with the finalize."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers.block_table import (
    SUPPORTED,
    forward_is_known,
    modeling_module,
)
from sgl_moe_jit.integrations.transformers.experts import (
    EXPERTS_IMPLEMENTATION,
    expert_weights,
    register,
)

# What a fused block remembers, under a name that is an ordinary attribute: deepcopy and pickle
# carry it along.
_PREVIOUS = "_sgl_moe_jit_previous"
_PREFIX = "Fused"
# Every fused block alive, copies included. Blocks of one model share a config, also with blocks
# that a caller's sub-module does not reach.
_fused_blocks: WeakSet[torch.nn.Module] = WeakSet()


class _Previous(NamedTuple):
    """What to go back to. Kept, since by then the experts may be wrapped and show no config."""

    implementation: str | None
    config: Any


@dataclass(frozen=True)
class FusionReport:
    """What :func:`fuse_shared_experts` did.

    Attributes:
        fused: Names of the blocks that now add the shared expert in the finalize.
        skipped: (name, reason) of every other block with experts.
    """

    fused: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]


def _set_state(self: Any, state: dict[str, Any]) -> None:
    """Restore a copied or unpickled block, and count it among the fused ones."""
    torch.nn.Module.__setstate__(self, state)
    _fused_blocks.add(self)


def _fused_class(stock: str) -> Any:
    name = _PREFIX + stock
    if name not in globals():
        original = getattr(import_module(modeling_module(stock)), stock)
        forward = SUPPORTED[stock][1].forward
        members = {
            "__module__": __name__,
            "__doc__": forward.__doc__,
            "forward": forward,
            "__setstate__": _set_state,
        }
        globals().setdefault(name, type(name, (original,), members))
    return globals()[name]


def __getattr__(name: str) -> Any:
    """Make the fused class of that name: how pickle finds a class that no statement defines."""
    stock = name.removeprefix(_PREFIX)
    if stock == name or stock not in SUPPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _fused_class(stock)


def _is_fused(module: torch.nn.Module) -> bool:
    return _PREVIOUS in module.__dict__


def _holders(config: Any) -> list[torch.nn.Module]:
    return [m for m in _fused_blocks if _is_fused(m) and m.__dict__[_PREVIOUS].config is config]


def _why_not(module: torch.nn.Module) -> str | None:
    """Return why a block with experts is left alone, or None when it can be fused."""
    cls = type(module)
    if _is_fused(module):
        return "already fused"
    if not any(hasattr(module, name) for name in ("shared_experts", "shared_expert")):
        return f"{cls.__name__} has no shared expert"
    if cls.__name__ not in SUPPORTED or cls.__module__ != modeling_module(cls.__name__):
        return f"{cls.__module__}.{cls.__qualname__} is not a block known here"
    style = SUPPORTED[cls.__name__][1]
    for name in style.children:
        if not isinstance(getattr(module, name, None), torch.nn.Module):
            return f"{cls.__name__}.{name}: expected a module, got {getattr(module, name, None)!r}"
    if not forward_is_known(cls, style):
        return f"{cls.__name__}.forward of this transformers version is not the one known here"
    if "forward" in module.__dict__:
        return f"{cls.__name__}.forward is patched on this instance"
    return _why_not_experts(cast("Any", module).experts)


def _why_not_experts(experts: Any) -> str | None:
    if "forward" in experts.__dict__:
        return f"{type(experts).__name__}.forward is patched on this instance"
    try:
        expert_weights(experts)
    except UnsupportedError as error:
        return str(error)
    config: Any = getattr(experts, "config", None)
    if not hasattr(config, "_experts_implementation"):
        return f"{type(experts).__name__}.config: expected a transformers config, got {config!r}"
    implementation = config._experts_implementation
    if implementation == "deepgemm_megamoe":
        return f"the experts' weights are laid out for {implementation!r}"
    return None


def fuse_shared_experts(model: torch.nn.Module) -> FusionReport:
    """Let a model's MoE blocks add their shared expert in the finalize: one kernel, one rounding.

    The blocks stay the same objects with the same modules, parameters and hooks; only their class
    changes, to a subclass. So ``state_dict``, ``save_pretrained``, ``deepcopy`` and pickle work as
    before. Router, experts and shared experts are called as modules: hooks fire and adapters work.
    While something looks at the experts' own output (a forward hook, a patched forward), that call
    finishes it first, as the stock block does; the result is the same to rounding.

    The experts implementation of these blocks becomes ``"sgl_moe_jit"``. It is chosen in a config,
    so it holds for every layer that shares the config, also for those outside ``model``: these run
    it unfused. Choosing another one later is allowed and right, but then nothing is fused. So it is
    with ``SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE=0``, which code compiled by ``torch.compile``
    ignores.

    ``torch.compile(fullgraph=True)`` takes a fused block whose experts the ``grouped_mm`` runner
    serves; where only ``native`` does (float16, odd strides) the graph breaks at the experts. As
    everywhere in torch, a hook added after that compilation does not fire where no graph breaks.

    Args:
        model: A transformers model, or any module that holds blocks of one.

    Returns:
        The names of the fused blocks, and why others were left alone.
    """
    register()
    fused: list[tuple[str, Any]] = []
    skipped: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "experts", None), torch.nn.Module):
            continue
        reason = _why_not(module)
        if reason is None:
            fused.append((name, module))
        else:
            skipped.append((name, reason))
    # Blocks share a config, so all are asked before the first is changed.
    previous = [_previous(module.experts.config) for _, module in fused]
    for (_, module), before in zip(fused, previous, strict=True):
        # Not through the public setter, which would also set nested configs of other models.
        before.config._experts_implementation_internal = EXPERTS_IMPLEMENTATION
        setattr(module, _PREVIOUS, before)
        module.__class__ = _fused_class(type(module).__name__)
        _fused_blocks.add(module)
    return FusionReport(tuple(name for name, _ in fused), tuple(skipped))


def _previous(config: Any) -> _Previous:
    implementation = config._experts_implementation
    if implementation == EXPERTS_IMPLEMENTATION:
        for other in _holders(config):  # it is ours because of them
            return cast("_Previous", other.__dict__[_PREVIOUS])
    return _Previous(implementation, config)


def _check_unfusable(name: str, module: torch.nn.Module) -> None:
    cls = type(module)
    if cls.__module__ != __name__:
        raise UnsupportedError(
            f"block {name!r}: expected the class that fuse_shared_experts gave it, got "
            f"{cls.__module__}.{cls.__qualname__}, set afterwards (fully_shard does that); undo "
            "that first, or unfuse before it"
        )
    if "forward" in module.__dict__:
        raise UnsupportedError(
            f"block {name!r}: expected no forward on the instance, got "
            f"{module.__dict__['forward']!r}, which may hold the fused one (an offloading hook "
            "does); remove the hook and `del block.forward` first"
        )


def unfuse_shared_experts(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo :func:`fuse_shared_experts`: each block gets its own class back.

    The experts implementation from before comes back too, unless another one was chosen meanwhile
    or a fused block elsewhere still shares the config: then with the last of these.

    Returns:
        The names of the blocks that were fused.

    Raises:
        UnsupportedError: a block's class was changed or its ``forward`` patched since; names the
            block. Nothing is changed then.
    """
    blocks = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    for name, module in blocks:
        _check_unfusable(name, module)
    for _, module in blocks:
        before: _Previous = module.__dict__.pop(_PREVIOUS)
        module.__class__ = type(module).__bases__[0]
        _fused_blocks.discard(module)
        config = before.config
        if config._experts_implementation == EXPERTS_IMPLEMENTATION and not _holders(config):
            config._experts_implementation_internal = before.implementation
    return tuple(name for name, _ in blocks)
