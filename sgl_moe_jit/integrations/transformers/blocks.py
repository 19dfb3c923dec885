# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""MoE blocks of transformers models that run as this library's block, in place."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers.block_table import (
    GATED,
    PLAIN,
    ROUTED,
    Style,
    forward_is_known,
    modeling_module,
    style_of,
)
from sgl_moe_jit.integrations.transformers.experts import (
    EXPERTS_IMPLEMENTATION,
    expert_weights,
    register,
)
from sgl_moe_jit.integrations.transformers.fused_block import (
    CALL_STATE,
    FusedBlock,
    FusedGated,
    FusedPlain,
    FusedRouted,
    called_as_is,
)
from sgl_moe_jit.integrations.transformers.hooks import change_class, forward_is_own
from sgl_moe_jit.moe.input_checks import check_module
from sgl_moe_jit.moe.runners.plan import explain

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
    """What :func:`fuse_shared_experts` did. ``str()`` gives it in lines.

    Attributes:
        fused: Names of the blocks that now run as :class:`SharedExpertMoEBlock`.
        skipped: (name, reason) of every other block with experts.
        details: (name, how) of every fused block: the runner that serves its experts as they are
            now, and whether one kernel finishes both outputs or why not. ``explain()`` of a block
            says how its last call ran.
    """

    fused: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    details: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"fused    {name or '(the module itself)'}: {how}" for name, how in self.details]
        lines += [f"skipped  {name or '(the module itself)'}: {why}" for name, why in self.skipped]
        return "\n".join(lines) or "no block with experts"


def _set_state(self: Any, state: dict[str, Any]) -> None:
    """Restore a copied or unpickled block, and count it among the fused ones."""
    torch.nn.Module.__setstate__(self, state)
    _fused_blocks.add(self)


def _base_of(style: Style) -> type[FusedBlock]:
    bases: dict[Style, type[FusedBlock]] = {
        PLAIN: FusedPlain,
        GATED: FusedGated,
        ROUTED: FusedRouted,
    }
    return bases[style]


def _fused_class(stock: str) -> Any:
    name = _PREFIX + stock
    if name not in globals():
        original = getattr(import_module(modeling_module(stock)), stock)
        base = _base_of(cast("Style", style_of(stock)))
        members = {
            "__module__": __name__,
            "__doc__": base.__doc__,
            "__init__": original.__init__,
            "__setstate__": _set_state,
        }
        globals().setdefault(name, type(name, (base, original), members))
    return globals()[name]


def __getattr__(name: str) -> Any:
    """Make the fused class of that name: how pickle finds a class that no statement defines."""
    stock = name.removeprefix(_PREFIX)
    if stock == name or style_of(stock) is None:
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
    style = style_of(cls.__name__)
    if style is None and not any(hasattr(module, n) for n in ("shared_experts", "shared_expert")):
        return f"{cls.__name__} has no shared expert and is not a block known here"
    if style is None or cls.__module__ != modeling_module(cls.__name__):
        return f"{cls.__module__}.{cls.__qualname__} is not a block known here"
    for name in style.children:
        if not isinstance(getattr(module, name, None), torch.nn.Module):
            return f"{cls.__name__}.{name}: expected a module, got {getattr(module, name, None)!r}"
    if not forward_is_known(cls, style):
        return f"{cls.__name__}.forward of this transformers version is not the one known here"
    if not forward_is_own(module):
        return f"{cls.__name__}.forward is patched on this instance"
    return _why_not_experts(cast("Any", module).experts)


def _why_not_experts(experts: Any) -> str | None:
    if not forward_is_own(experts):
        return f"{type(experts).__name__}.forward is patched on this instance"
    if isinstance(getattr(experts, "base_layer", None), torch.nn.Module):  # PEFT's name for it
        return f"a {type(experts).__name__} stands around the experts; fuse first, then add it"
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


def _how(block: Any) -> str:
    """Return how a fused block will run, as far as that is known before a call."""
    reason = called_as_is(block.experts)
    if reason:
        return f"experts called as they are, their output is finished before the add: {reason}"
    plan = explain(expert_weights(block.experts))
    if block.shared_experts is None:
        return f"runner {plan.runner}, no shared experts to add"
    if not plan.can_defer:
        return f"runner {plan.runner} finishes its own output before the add: {plan.deferral}"
    return f"runner {plan.runner}, one kernel sums its rows and adds the shared experts"


def fuse_shared_experts(model: torch.nn.Module) -> FusionReport:
    """Let a model's MoE blocks run as :class:`SharedExpertMoEBlock`, in place.

    Router, experts through the runner that ``auto`` selects, shared experts on a stream of their
    own inside a CUDA graph capture, and one kernel that sums the experts' rows and adds the shared
    experts, with one rounding. ``block.explain()`` says how the last call ran;
    ``block.dual_stream`` and a ``deferred_finalize_context`` work as with any such block.

    The blocks stay the same objects with the same modules, parameters and hooks; only their class
    changes, to a subclass of both. So ``state_dict``, ``save_pretrained``, ``deepcopy`` and pickle
    work as before, no weight is copied, and each call sees the weights as they are. Router, experts
    and shared experts are called as modules, with what the stock block gives them: hooks fire,
    router logits are recorded, adapters work, accelerate's ``device_map`` moves what it has to. On
    CUDA a known router that nobody looks at is one kernel after its logits; see ``stock_gates``.
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

    Known are DeepSeek-V2/V3 (Kimi-K2 has the latter's class), GLM-4-MoE, Qwen2-MoE and the others
    of ``block_table``, and blocks without shared experts (Qwen3-MoE).

    Args:
        model: A transformers model, or any module that holds blocks of one.

    Returns:
        The names of the fused blocks and how they run, and why others were left alone.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_module("model", model)
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
        change_class(module, _fused_class(type(module).__name__))
        _fused_blocks.add(module)
    details = tuple((name, _how(module)) for name, module in fused)
    return FusionReport(tuple(name for name, _ in fused), tuple(skipped), details)


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
    if not forward_is_own(module):
        forward = module.__dict__["forward"]
        raise UnsupportedError(
            f"block {name!r}: expected no forward on the instance, got "
            f"{getattr(forward, '__qualname__', type(forward).__name__)}, which may hold the fused "
            "one (accelerate leaves one behind where it removes a hook); remove the hook and "
            "`del block.forward` first"
        )


def unfuse_shared_experts(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo :func:`fuse_shared_experts`: each block gets its own class back.

    The experts implementation from before comes back too, unless another one was chosen meanwhile
    or a fused block elsewhere still shares the config: then with the last of these.

    Returns:
        The names of the blocks that were fused.

    Raises:
        TypeError: ``model`` is not a module.
        UnsupportedError: a block's class was changed or its ``forward`` patched since; names the
            block. Nothing is changed then.
    """
    check_module("model", model)
    blocks = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    for name, module in blocks:
        _check_unfusable(name, module)
    for _, module in blocks:
        before: _Previous = module.__dict__.pop(_PREVIOUS)
        for state in CALL_STATE:
            module.__dict__.pop(state, None)
        change_class(module, type(module).__bases__[1])
        _fused_blocks.discard(module)
        config = before.config
        if config._experts_implementation == EXPERTS_IMPLEMENTATION and not _holders(config):
            config._experts_implementation_internal = before.implementation
    return tuple(name for name, _ in blocks)
