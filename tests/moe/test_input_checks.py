# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of another kind or shape are refused by name before any part of a layer has run."""

import pytest
import torch

from sgl_moe_jit import (
    FusedMoE,
    PackedTopKOutput,
    PreparedMoE,
    Router,
    RouterConfig,
    SharedExpertMoEBlock,
    StandardTopKOutput,
    create_runner,
    finalize_output,
    register_runner,
    router_logits,
    select_experts,
    warmup,
)
from sgl_moe_jit.moe.loaders import register_loader
from sgl_moe_jit.ops import silu_and_mul
from sgl_moe_jit.ops.permute import expert_row_counts

T, H, E, K, WIDTH = 3, 16, 4, 2, 8
CONFIG = RouterConfig(E, K, "softmax")
X = torch.zeros(T, H)
TOPK = StandardTopKOutput(torch.ones(T, K), torch.zeros(T, K, dtype=torch.int32))


class Untouched(torch.nn.Module):
    """A part that nobody may call."""

    def forward(self, *args):
        raise AssertionError("it ran")


LAYER = FusedMoE.from_w13_w2(torch.zeros(E, 2 * WIDTH, H), torch.zeros(E, H, WIDTH))
BLOCK = SharedExpertMoEBlock(Untouched(), LAYER, Untouched())
ROUTER = Router(CONFIG, H)

WRONG = {
    "a list": ([[0.0] * H], TypeError, "expected a Tensor, got list"),
    "none": (None, TypeError, "expected a Tensor, got NoneType"),
    "sparse": (X.to_sparse(), TypeError, "expected a dense tensor, got layout torch.sparse_coo"),
    "no dimension": (torch.tensor(1.0), ValueError, r"expected \[.*\], got \(\)"),
    "no columns": (X[:, :0], ValueError, r"expected \[.*\], got \(3, 0\)"),
    "another width": (torch.zeros(T, H + 1), ValueError, rf"expected \[.*{H}\], got \(3, 17\)"),
    "twice the width": (torch.zeros(T, 2 * H), ValueError, rf"expected \[.*{H}\], got \(3, 32\)"),
}
OF_STATES = {
    "layer": lambda x: LAYER(x, TOPK),
    "layer, deferred": lambda x: LAYER.forward_deferred_finalize(x, TOPK),
    "native": lambda x: create_runner("native", LAYER.expert_weights()).run(x, TOPK, defer=False),
    "block": lambda x: BLOCK(x),
    "block, one stream": lambda x: BLOCK.forward_normal(x),
    "block, two streams": lambda x: BLOCK.forward_normal_dual_stream(x),
    "router": lambda x: ROUTER(x),
    "router, logits": lambda x: ROUTER.logits(x),
    "router, bypass": lambda x: ROUTER.bypass(x),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", OF_STATES)
@torch.no_grad()
def test_hidden_states(call, wrong):
    x, kind, text = WRONG[wrong]
    with pytest.raises(kind, match=f"^hidden_states: {text}"):
        OF_STATES[call](x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("call", ["block", "router", "router, bypass"])
def test_hidden_states_that_are_not_floating(call, dtype):
    with pytest.raises(TypeError, match=f"^hidden_states: expected a floating dtype, got {dtype}"):
        OF_STATES[call](X.to(dtype))


def test_a_nested_tensor_is_named():
    nested = torch.nested.nested_tensor([X], layout=torch.jagged)
    with pytest.raises(TypeError, match="hidden_states: expected a dense tensor, got a nested"):
        BLOCK(nested)


def test_a_hook_in_front_of_the_experts_may_change_the_width():
    """Then the block does not know which width is right; the experts still do."""
    layer = FusedMoE.from_w13_w2(torch.randn(E, 2 * WIDTH, H), torch.randn(E, H, WIDTH))
    layer.register_forward_pre_hook(lambda module, args: (args[0][:, :H], *args[1:]))
    wide = torch.randn(T, 2 * H)
    block = SharedExpertMoEBlock(lambda x: TOPK, layer)
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):  # experts gave [T, H] back
        block(wide)


MODULE = torch.nn.Linear
OTHERS = {
    "gate": (lambda: SharedExpertMoEBlock(None, LAYER), "gate: expected a module or function"),
    "gate class": (
        lambda: SharedExpertMoEBlock(MODULE, LAYER),
        "gate: expected a module or function, got the class Linear",
    ),
    "experts": (lambda: SharedExpertMoEBlock(ROUTER, X), "experts: expected a module or function"),
    "shared": (
        lambda: SharedExpertMoEBlock(ROUTER, LAYER, [1]),
        "shared_experts: expected a module or function or None, got list",
    ),
    "shared gate": (
        lambda: SharedExpertMoEBlock(ROUTER, LAYER, torch.relu, 1),
        "shared_expert_gate: expected a module or function or None, got int",
    ),
    "w13": (lambda: FusedMoE.from_w13_w2(None, X), "up: expected a Tensor, got NoneType"),
    "w2": (lambda: FusedMoE.from_w13_w2(X[None], [1]), "down: expected a Tensor, got list"),
    "prepared config": (
        lambda: PreparedMoE(LAYER.runner, None),
        "config: expected a RunnerConfig, got NoneType",
    ),
    "prepared runner": (
        lambda: PreparedMoE(3, LAYER.runner_config()),
        "runner: expected a MoERunner, got int",
    ),
    "router config": (lambda: Router(None, H), "config: expected a RouterConfig, got NoneType"),
    "router width": (lambda: Router(CONFIG, 1.5), "hidden_dim: expected an int, got float"),
    "runner": (lambda: register_runner(None), "entry: expected a RunnerEntry, got NoneType"),
    "loader": (lambda: register_loader("x", None), "loader: expected a module or function"),
    "loader name": (lambda: register_loader(1, print), "library: expected a string, got int"),
    "packed": (lambda: PackedTopKOutput([1]), "packed_ids: expected a Tensor, got list"),
    "ids": (
        lambda: LAYER(X, StandardTopKOutput(TOPK.topk_weights, [[0, 1]] * T)),
        "topk_ids: expected a Tensor, got list",
    ),
    "weights": (
        lambda: LAYER(X, StandardTopKOutput(None, TOPK.topk_ids)),
        "topk_weights: expected a Tensor, got NoneType",
    ),
    "logits": (lambda: select_experts(None, CONFIG), "logits: expected a Tensor, got NoneType"),
    "given ids": (
        lambda: ROUTER(X, topk_ids=[0]),
        "topk_ids: expected a Tensor, got list",
    ),
    "logits of": (
        lambda: router_logits(3, ROUTER.weight, CONFIG),
        "hidden_states: expected a Tensor, got int",
    ),
    "shared output": (
        lambda: finalize_output(X, [1.0]),
        "shared_output: expected a Tensor, got list",
    ),
    "gate logits": (
        lambda: finalize_output(X, X, shared_gate_logits=1.0),
        "shared_gate_logits: expected a Tensor, got float",
    ),
    "activation": (lambda: silu_and_mul(None), "x: expected a Tensor, got NoneType"),
    "counts": (lambda: expert_row_counts(None, 4), "topk_ids: expected a Tensor, got NoneType"),
    "counts dtype": (lambda: expert_row_counts(X, 4), "topk_ids: expected integers, got torch.fl"),
    "warmup": (lambda: warmup(9.0), "arch: expected a string or None, got float"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments(name):
    call, text = OTHERS[name]
    with pytest.raises(TypeError, match=f"^{text}"):
        call()


@pytest.mark.parametrize("shape", [(), (H,), (E, H)])
def test_weights_of_another_rank(shape):
    w = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^up, down: expected 3 dimensions, got"):
        FusedMoE.from_w13_w2(w, w)
