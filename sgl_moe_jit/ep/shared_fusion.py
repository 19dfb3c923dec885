# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Whether shared experts become slots of each rank, how many, and with what weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sgl_moe_jit import env
from sgl_moe_jit.ep.backends import dispatch_backend
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.input_checks import described
from sgl_moe_jit.ops.finalize_arguments import check_int

if TYPE_CHECKING:
    from sgl_moe_jit.moe.config import MoEConfig


@dataclass(frozen=True)
class SharedExpertFusionConfig:
    """What decides about shared experts as slots: switches, engine and model.

    Off by default. ``enable_fusion`` asks for fusion where nothing stands against it,
    ``enforce_fusion`` also against what is a matter of choice (overlap, formats, all-reduce).
    ``enable_waterfill`` asks for it where nothing stands against it, and for sending each token's
    shared expert to a rank with room.

    Attributes:
        enable_waterfill: Balance the shared experts over the ranks. Needs fusion.
        enforce_fusion: Fuse also where it is off by default.
        disable_fusion: Never fuse.
        enable_fusion: Fuse where nothing stands against it.
        backend: What moves tokens between ranks: a name of ``sgl_moe_jit.ep.backends.BACKENDS``.
        ep_size: Ranks.
        two_batch_overlap: Whether two halves of a batch run in turns, the shared experts of one
            beside the dispatch of the other.
        single_batch_overlap: Whether the shared experts run beside the dispatch of their batch.
        num_shared_experts: S: width of the shared MLP in widths of a routed expert. 0: none.
        routed_quantization: Format of the routed experts' weights, as
            :attr:`MoEConfig.quantization` names it; None: not quantized.
        shared_quantization: Format of the shared experts' weights.
        obstacle: What in the model itself rules fusion out; empty: nothing.

    Raises:
        ValueError: switches contradict each other; one message names all of them.
        TypeError: a switch is no bool, a number no int, ``obstacle`` no text.
    """

    enable_waterfill: bool = False
    enforce_fusion: bool = False
    disable_fusion: bool = False
    enable_fusion: bool = False
    backend: str = "torch"
    ep_size: int = 1
    two_batch_overlap: bool = False
    single_batch_overlap: bool = False
    num_shared_experts: int = 1
    routed_quantization: str | None = None
    shared_quantization: str | None = None
    obstacle: str = ""

    def __post_init__(self) -> None:
        """Refuse switches that contradict each other: none of them is overridden in silence."""
        for name in (*_SWITCHES, *_OVERLAPS):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {getattr(self, name)!r}")
        if not isinstance(self.obstacle, str):
            raise TypeError(f"obstacle: expected a str, got {self.obstacle!r}")
        for name in ("routed_quantization", "shared_quantization"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise TypeError(f"{name}: expected a str or None, got {getattr(self, name)!r}")
        for name, least in (("ep_size", 1), ("num_shared_experts", 0)):
            check_int(name, getattr(self, name), "an int of at most 64 bits")
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        backend = dispatch_backend(self.backend)
        wanted = [name for name in _SWITCHES if name != "disable_fusion" and getattr(self, name)]
        against = []
        if wanted and self.disable_fusion:
            against.append("disable_fusion=True")
        if self.enable_waterfill and not self.enforce_fusion:
            against += [f"{name}=True" for name in _OVERLAPS if getattr(self, name)]
        if self.enable_waterfill and not backend.has_rank_slots:
            against.append(f"backend={self.backend!r}, which has no shared slots to choose from")
        if against:
            asked = " and ".join(f"{name}=True" for name in wanted)
            if self.enable_waterfill and env.ENABLE_WATERFILL.get():
                asked += f" ({env.ENABLE_WATERFILL.name} is on)"
            needs = "waterfill needs fused shared experts; " if self.enable_waterfill else ""
            raise ValueError(
                f"{asked}: expected no switch against it, got {' and '.join(against)}; "
                f"{needs}take one side back"
                + (", or allow overlap with enforce_fusion=True" if self.overlaps else "")
            )

    @property
    def overlaps(self) -> str:
        """Which kinds of overlap are on, in words; empty: none."""
        return " and ".join(name for name in _OVERLAPS if getattr(self, name))

    @classmethod
    def from_environment(cls, **options: Any) -> SharedExpertFusionConfig:
        """Build with ``enable_waterfill`` from ``SGL_MOE_JIT_ENABLE_WATERFILL``.

        Args:
            **options: Of the class; an ``enable_waterfill`` among them is taken instead.
        """
        options.setdefault("enable_waterfill", env.ENABLE_WATERFILL.get())
        return cls(**options)

    @classmethod
    def from_model(cls, model: MoEConfig, **options: Any) -> SharedExpertFusionConfig:
        """Build for one MoE layer of a model: sizes and formats are its own.

        Args:
            model: The layer.
            **options: Of the class: switches and engine. ``enable_waterfill`` as in
                :meth:`from_environment`.
        """
        shared = model.shared_experts
        return cls.from_environment(
            num_shared_experts=0 if shared is None else _slots(model),
            routed_quantization=model.quantization,
            shared_quantization=None if shared is None else shared.quantization,
            obstacle=_obstacle(model),
            **options,
        )


_SWITCHES = ("enable_waterfill", "enforce_fusion", "disable_fusion", "enable_fusion")
_OVERLAPS = ("two_batch_overlap", "single_batch_overlap")


def _slots(model: MoEConfig) -> int:
    assert model.shared_experts is not None
    return max(1, model.shared_experts.intermediate_dim // model.intermediate_dim)


def _obstacle(model: MoEConfig) -> str:
    """Return why a model's shared experts cannot be slots among the routed ones; empty: nothing."""
    shared = model.shared_experts
    if shared is None:
        return ""
    found = []
    if shared.is_gated:
        found.append("a gate on the input scales them, and their column has one weight for all")
    if shared.intermediate_dim % model.intermediate_dim:
        found.append(
            f"their width {shared.intermediate_dim} is no multiple of the routed experts' "
            f"{model.intermediate_dim}"
        )
    if model.expert_hidden_dim != model.hidden_dim:
        found.append(
            f"routed experts work on {model.expert_hidden_dim} values a token and they on "
            f"{model.hidden_dim}"
        )
    if shared.activation != model.activation:
        found.append(f"activations differ: routed {model.activation}, shared {shared.activation}")
    if model.num_zero_experts:
        found.append("experts without weights have ids of their own behind the routed ones")
    return "; ".join(found)


def determine_num_fused_shared_experts(config: SharedExpertFusionConfig) -> tuple[int, str]:
    """Return how many shared slots each rank has, and why.

    Source: the rules are those of sglang's DeepEP path, except that no switch changes another, and
    that ``enforce_fusion`` also overrides differing formats: the caller then converts the shared
    experts, since a layer refuses to load two formats.

    Args:
        config: Switches, engine and model.

    Returns:
        (S, why), or (0, what stands against it).

    Raises:
        TypeError: ``config`` is something else.
        UnsupportedError: ``enforce_fusion`` or ``enable_waterfill`` asks for what cannot be; says
            why. They are never ignored.
    """
    if not isinstance(config, SharedExpertFusionConfig):
        raise TypeError(f"config: expected a SharedExpertFusionConfig, got {described(config)}")
    if config.disable_fusion:
        return 0, "disable_fusion=True"
    hard, soft = "; ".join(_hard_reasons(config)), "; ".join(_soft_reasons(config))
    if config.enforce_fusion or config.enable_waterfill:
        asked = "enforce_fusion" if config.enforce_fusion else "enable_waterfill"
        if hard or (soft and not config.enforce_fusion):
            hint = "" if hard else "; enforce_fusion=True overrides this"
            raise UnsupportedError(
                f"{asked}=True: expected shared experts that can be fused; {hard or soft}{hint}"
            )
        return config.num_shared_experts, f"{asked}=True" + (f", although {soft}" if soft else "")
    if hard or soft:
        return 0, "; ".join(filter(None, (soft, hard)))
    if not config.enable_fusion:
        return 0, "off by default; enable_fusion=True or enable_waterfill=True switches it on"
    return config.num_shared_experts, "enable_fusion=True"


def _hard_reasons(config: SharedExpertFusionConfig) -> list[str]:
    """Return what no switch can change."""
    if config.num_shared_experts == 0:
        return ["the model has no shared experts"]
    found = [config.obstacle] if config.obstacle else []
    backend = dispatch_backend(config.backend)
    if not backend.has_rank_slots and not backend.is_all_reduce:
        found.append(f"backend {config.backend!r} has no slots for shared experts")
    if config.enable_waterfill and config.num_shared_experts > 1:
        found.append(
            f"waterfill sends one shared slot a token, and this model has "
            f"{config.num_shared_experts}"
        )
    return found


def _soft_reasons(config: SharedExpertFusionConfig) -> list[str]:
    """Return what keeps fusion off unless it is enforced."""
    found = []
    routed, shared = config.routed_quantization, config.shared_quantization
    if routed != shared and config.num_shared_experts:
        found.append(
            "one layer holds one format, and routed experts are "
            f"{routed or 'not quantized'}, shared experts {shared or 'not quantized'}"
        )
    if config.overlaps:
        found.append(f"{config.overlaps} runs separate shared experts beside the dispatch")
    if dispatch_backend(config.backend).is_all_reduce and config.ep_size > 1:
        found.append(
            f"without dispatch each of {config.ep_size} ranks would compute every shared expert, "
            f"with weight 1/{config.ep_size}"
        )
    return found


def fused_shared_expert_weight(
    routed_scaling_factor: float | None,
    already_in_topk_weights: bool,
    *,
    all_reduce_ep_size: int = 1,
) -> float:
    """Return the weight of a token's shared columns, so that their net coefficient is 1.

    Routed and shared rows are summed together. A factor that comes after the sum multiplies the
    shared rows as well, so they are divided by it first. Keep the weight in float32: 1/2.5 in
    bfloat16, times 2.5, is 1.001.

    Args:
        routed_scaling_factor: Of the routed experts. None, 0 and 1: none.
        already_in_topk_weights: Whether the routed weights hold it, so that none comes later.
        all_reduce_ep_size: Ranks that all compute the token's shared experts, and whose outputs are
            summed: EP without dispatch. With slots of each rank one rank computes them: 1.

    Returns:
        1, or ``1 / routed_scaling_factor`` when it comes later; divided by ``all_reduce_ep_size``.

    Raises:
        TypeError: the factor or the ranks are no numbers, or ``already_in_topk_weights`` no bool.
        ValueError: the factor is negative, not finite or has no finite inverse, or there are no
            ranks.
    """
    check_int("all_reduce_ep_size", all_reduce_ep_size, "an int of at most 64 bits")
    if all_reduce_ep_size < 1:
        raise ValueError(f"all_reduce_ep_size: expected at least 1, got {all_reduce_ep_size}")
    given: object = routed_scaling_factor
    if not isinstance(given, (float, int, type(None))):
        raise TypeError(
            f"routed_scaling_factor: expected a number or None, got {type(given).__name__}"
        )
    if not isinstance(already_in_topk_weights, bool):
        raise TypeError(
            f"already_in_topk_weights: expected a bool, got {already_in_topk_weights!r}"
        )
    factor = float(routed_scaling_factor or 1.0)
    if not (factor > 0 and math.isfinite(factor) and math.isfinite(1.0 / factor)):
        raise ValueError(
            "routed_scaling_factor: expected a positive number with a finite inverse, None or 0, "
            f"got {factor}"
        )
    return (1.0 if already_in_topk_weights else 1.0 / factor) / all_reduce_ep_size
