# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One rank's MoE layer of named public models, as transformers' own block and as ours on it.

The block is transformers' own class with the model's widths and one rank's share of the experts;
router and shared experts are whole. Every token picks ``top_k`` of the rank's experts, so that a
rank works as it would if every rank brought it tokens. Ours is loaded from it: the parameters are
the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.bench.cases import CASES, FinalizeCase
from sgl_moe_jit.moe.block import SharedExpertMoEBlock

IMPLEMENTATION = "grouped_mm"  # transformers' quickest way through the experts


@dataclass(frozen=True)
class LayerCase:
    """One rank's share of one model's layer.

    Attributes:
        shape: Hidden size and top_k.
        local_experts: Routed experts of the rank.
        width: Of an expert, I.
        block: Class of the block in transformers, with its model's folder.
        settings: Of the model's configuration, beside the sizes.
    """

    shape: FinalizeCase
    local_experts: int
    width: int
    block: tuple[str, str]
    settings: dict[str, Any]

    def describe(self) -> str:
        """Return what stands beside the case's name in a result."""
        shared = self.settings.get("n_shared_experts", 0)
        text = f"{self.local_experts} local experts of width {self.width}"
        return f"{text}, {shared} shared" if shared else f"{text}, no shared"


_DEEPSEEK = ("deepseek_v3", "DeepseekV3MoE")
_GROUPED = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
_UNGROUPED = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
# An eighth of the routed experts each; of DeepSeek-V3's eight groups so many that four picks are
# made, as in the whole.
LAYERS = {
    layer.shape.name: layer
    for layer in (
        LayerCase(CASES["deepseek-v3"], 32, 2048, _DEEPSEEK, _GROUPED),
        LayerCase(CASES["kimi-k2"], 48, 2048, _DEEPSEEK, _UNGROUPED),
        LayerCase(CASES["glm-4.5"], 20, 1536, ("glm4_moe", "Glm4MoeMoE"), _UNGROUPED),
        LayerCase(CASES["qwen3-235b"], 16, 1536, ("qwen3_moe", "Qwen3MoeSparseMoeBlock"), {}),
    )
}


def layer_of(case: FinalizeCase) -> LayerCase:
    """Return the layer of a case.

    Raises:
        ValueError: none is described here.
    """
    if case.name not in LAYERS:
        raise ValueError(f"--cases: expected some of {', '.join(LAYERS)}, got {case.name!r}")
    return LAYERS[case.name]


def make_stock(layer: LayerCase, device: torch.device | str) -> torch.nn.Module:
    """Return transformers' block with random parameters, outputs of size one.

    Raises:
        ImportError: transformers is missing.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "bench layer and memory need transformers. Install it with: "
            "pip install 'sgl-moe-jit[transformers]'"
        ) from error
    folder, name = layer.block
    config_name = {"deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "qwen3_moe": "Qwen3Moe"}
    experts = "num_experts" if folder == "qwen3_moe" else "n_routed_experts"
    config = getattr(transformers, f"{config_name[folder]}Config")(
        **{experts: layer.local_experts},
        hidden_size=layer.shape.hidden_dim,
        moe_intermediate_size=layer.width,
        num_experts_per_tok=layer.shape.top_k,
        norm_topk_prob=True,
        **layer.settings,
    )
    config._experts_implementation = IMPLEMENTATION
    modeling = getattr(transformers.models, folder)
    kind = getattr(getattr(modeling, f"modeling_{folder}"), name)
    with torch.device(device), torch.no_grad():
        block: torch.nn.Module = kind(config).to(torch.bfloat16)
        gate = block.get_submodule("gate")
        if hasattr(gate, "e_score_correction_bias"):
            gate.float()  # as from_pretrained leaves such routers
        generator = torch.Generator(device=device).manual_seed(0)
        for parameter in block.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return block.eval().requires_grad_(False)


def load(block: torch.nn.Module) -> SharedExpertMoEBlock:
    """Return ours on the same parameters."""
    from sgl_moe_jit.integrations.transformers import load_block

    return load_block(block)


def make_batch(layer: LayerCase, num_tokens: int, device: torch.device | str) -> Tensor:
    """Return [T, H] bfloat16 hidden states."""
    generator = torch.Generator(device=device).manual_seed(1)
    x = torch.empty(num_tokens, layer.shape.hidden_dim, dtype=torch.bfloat16, device=device)
    return x.normal_(generator=generator)


@dataclass(frozen=True)
class Batch:
    """One layer and one number of tokens to measure it with.

    Attributes:
        case: The model's shape.
        layer: Its layer.
        stock: transformers' block.
        block: Ours on the same parameters.
        x: [T, H] hidden states.
    """

    case: FinalizeCase
    layer: LayerCase
    stock: torch.nn.Module
    block: SharedExpertMoEBlock
    x: Tensor


def batches(
    cases: Iterable[FinalizeCase], tokens: Iterable[int], device: torch.device | str = "cuda"
) -> Iterator[Batch]:
    """Yield each layer with each number of tokens.

    A layer is made once, and let go before the next is made if the caller has let go its batch.
    """
    for case in cases:
        layer = layer_of(case)
        stock = make_stock(layer, device)
        block = load(stock)
        for num_tokens in tokens:
            yield Batch(case, layer, stock, block, make_batch(layer, num_tokens, device))
        del stock, block
        torch.cuda.empty_cache()


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = gate.double() @ x
    return down.double() @ (hidden * torch.sigmoid(hidden) * (up.double() @ x))


def oracle(stock: torch.nn.Module, x: Tensor, topk: Callable[[Tensor], Any]) -> Tensor:
    """Return the layer's output in float64, token by token and expert by expert.

    Args:
        stock: transformers' block.
        x: [T, H], few tokens.
        topk: From hidden states to weights and ids. Given, since a tie or a rounding decides which
            expert a token goes to; which those are is the router's matter.
    """
    module: Any = stock
    chosen = topk(x)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    shared = getattr(module, "shared_experts", None)
    for token, row in enumerate(x.double()):
        for expert, scale in zip(chosen.topk_ids[token], chosen.topk_weights[token], strict=True):
            gate, up = module.experts.gate_up_proj[expert].chunk(2)
            out = _swiglu(row, gate, up, module.experts.down_proj[expert])
            total[token] += scale.double() * out
        if shared is not None:
            total[token] += _swiglu(
                row, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight
            )
    return total
