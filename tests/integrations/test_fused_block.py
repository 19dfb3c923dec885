# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A fused block is a ``SharedExpertMoEBlock`` on the model's own modules and parameters."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from sgl_moe_jit import deferred_finalize_context
from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse
from sgl_moe_jit.integrations.transformers import unfuse_shared_experts as unfuse
from sgl_moe_jit.moe.block import SharedExpertMoEBlock

from .layer_oracle import block_oracle, check_block
from .tiny_models import (
    ALL_FUSED_FAMILIES,
    BLOCK_ROUNDINGS,
    FUSED_FAMILIES,
    HIDDEN,
    SHARED_FAMILIES,
    assert_close,
    build,
    last_block,
    let_runners_overwrite,
    moe_blocks,
    tokens,
)


@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@torch.no_grad()
def test_the_whole_block_runs_and_says_how(family):
    block, x = last_block(family), torch.randn(2, 3, HIDDEN)
    stock, cls = block(x), type(block)
    report = fuse(block)
    assert isinstance(block, SharedExpertMoEBlock) and isinstance(block, cls)
    assert "not called yet" in str(block.explain())
    assert_close(block(x), stock, BLOCK_ROUNDINGS, family)
    shared = family != "qwen3_moe"
    assert block.last_plan.deferred is shared
    adds = "one kernel sums its rows and adds" if shared else "no shared experts to add"
    assert report.details == (("", report.details[0][1]),)
    assert report.details[0][1].startswith("runner grouped_mm, " + adds)
    assert str(report) == f"fused    (the module itself): {report.details[0][1]}"
    assert "grouped_mm (asked for: auto)" in str(block.explain())
    assert unfuse(block) == ("",)
    assert type(block) is cls and torch.equal(block(x), stock)


@pytest.mark.parametrize("family", ALL_FUSED_FAMILIES)
@pytest.mark.parametrize("defer", [True, False])
@torch.no_grad()
def test_bfloat16_output_against_float64(family, defer):
    block, x = last_block(family).bfloat16(), torch.randn(3, 11, HIDDEN).bfloat16()
    want, allowed = block_oracle(block, x, deferred=defer)
    fuse(block)
    check_block(block(x, defer=defer), want, allowed, family)


@torch.no_grad()
def test_the_context_the_argument_and_the_report_of_a_refusal(monkeypatch):
    block, x = last_block("deepseek_v3").bfloat16(), torch.randn(2, 3, HIDDEN).bfloat16()
    fuse(block)
    deferred, finished = block(x, defer=True), block(x, defer=False)
    assert not torch.equal(deferred, finished)
    with deferred_finalize_context(enabled=False):
        assert torch.equal(block(x), finished)
    assert "request: no, declined by the caller" in block.last_plan.refusals
    monkeypatch.setenv("SGL_MOE_JIT_DEFERRED_FINALIZE_MAX_TOKENS", "5")
    assert torch.equal(block(x), finished)
    assert torch.equal(block(x[:1]), deferred[:1])


@torch.no_grad()
def test_a_block_that_cannot_defer_says_so_in_the_report():
    (name, how) = fuse(last_block("deepseek_v3").half()).details[0]
    assert name == "" and "runner native finishes its own output before the add: dtype" in how
    block = last_block("deepseek_v3")
    block.experts.register_forward_hook(lambda *args: None)
    (_, how) = fuse(block).details[0]
    assert how.endswith("finished before the add: a hook on them expects a tensor")


@pytest.mark.field_report("A20")
@pytest.mark.parametrize("family", FUSED_FAMILIES)
@pytest.mark.parametrize("how", ["copy_", "load", "assign", "step", "data", "to"])
def test_a_weight_update_is_seen_by_the_next_call(family, how):
    block, x = last_block(family), torch.randn(2, 3, HIDDEN)
    fuse(block)
    before = block(x).detach()
    other = {k: v * 0.5 + 0.1 for k, v in block.state_dict().items() if v.is_floating_point()}
    with torch.no_grad():
        if how == "copy_":
            for name, p in block.named_parameters():
                p.copy_(other[name])
        elif how == "data":
            for name, p in block.named_parameters():
                p.data = other[name]
    if how in ("load", "assign"):
        block.load_state_dict(other, strict=False, assign=how == "assign")
    elif how == "step":
        block(x).square().sum().backward()
        torch.optim.SGD(block.parameters(), lr=0.01).step()
    elif how == "to":
        block.double()
        x = x.double()
    with torch.no_grad():
        got = block(x)
        unfuse(block)
        block.experts.config._experts_implementation = "eager"
        stock = block(x)
    if how == "to":
        assert got.dtype == torch.float64
        assert (got - stock).abs().max() <= 1e-12 * stock.abs().max()
    else:
        assert (got - before).abs().max() > 1e-3 * before.abs().max()
        assert_close(got, stock, BLOCK_ROUNDINGS, f"{family} {how}")


def _tensor_bytes():
    """Bytes of all dense tensors alive, others' traced ones apart: those have no memory."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if is_plain and x.device.type == "cpu":
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.field_report("A20")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_no_weight_is_copied_or_kept(family):
    model, ids = build(family), tokens()
    with torch.no_grad():
        model(ids)
        parameters = [id(p) for p in model.parameters()]
        before = _tensor_bytes()
        assert fuse(model).fused
        model(ids)
        assert _tensor_bytes() <= before
    assert [id(p) for p in model.parameters()] == parameters
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    del state
    assert _tensor_bytes() <= before  # nothing holds the weights that were replaced


@pytest.mark.field_report("A19")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_adapters_on_router_and_shared_experts_take_effect_and_train(family, when):
    class Adapter(torch.nn.Module):
        """Low-rank, around a router, an MLP or a linear layer."""

        def __init__(self, base, seed):
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.base = base
            self.a = torch.nn.Parameter(torch.randn(2, HIDDEN, generator=generator) / 4)
            self.b = torch.nn.Parameter(torch.randn(HIDDEN, 2, generator=generator) / 4)

        def forward(self, x):
            return self.base(x + x @ self.a.T @ self.b.T)

    def adapt(block):
        block.gate = Adapter(block.gate, 1)
        if hasattr(block, "shared_expert"):
            block.shared_expert.up_proj = Adapter(block.shared_expert.up_proj, 2)
            block.shared_expert = Adapter(block.shared_expert, 4)
            block.shared_expert_gate = Adapter(block.shared_expert_gate, 3)
        elif getattr(block, "shared_experts", None) is not None:
            block.shared_experts = Adapter(block.shared_experts, 2)

    x, results = torch.randn(2, 3, HIDDEN), []
    plain = last_block(family)(x)
    for fused in (False, True):
        block = last_block(family)
        if fused and when == "after":
            assert fuse(block).fused
            block(x)  # remembers no module of it
        adapt(block)
        if fused and when == "before":
            assert fuse(block).fused
        out = block(x)
        out.square().sum().backward()
        names = [n for n, _ in block.named_parameters() if n.endswith((".a", ".b"))]
        results.append((out.detach(), {n: block.get_parameter(n).grad for n in names}))
    (stock, stock_grads), (got, grads) = results
    assert (stock - plain).abs().max() > 1e-2 * plain.abs().max()
    assert_close(got, stock, 2 * BLOCK_ROUNDINGS, family)
    assert stock_grads and grads.keys() == stock_grads.keys()
    for name, expected in stock_grads.items():
        assert expected.any()
        assert_close(grads[name], expected, 4 * BLOCK_ROUNDINGS, name)


@pytest.mark.field_report("A23")
def test_a_block_without_memory_is_fused_and_refuses_to_run():
    with torch.device("meta"):
        block = last_block("deepseek_v3")
    assert fuse(block).fused == ("",)
    assert all(p.is_meta for p in block.parameters())
    with pytest.raises(
        ValueError, match=r"expected weights with memory, got device meta; .*to_empty"
    ):
        block(torch.empty(1, 3, HIDDEN, device="meta"))
    stock = last_block("deepseek_v3")
    block.to_empty(device="cpu")
    block.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(1, 3, HIDDEN)
    assert_close(block(x), stock(x), BLOCK_ROUNDINGS, "after to_empty")


@pytest.mark.parametrize("family", SHARED_FAMILIES)
def test_shared_experts_run_without_tokens_too(family):
    """Their hooks, or the collectives of sharded parameters, count on being called."""
    block, seen = last_block(family), []
    fuse(block)
    child = getattr(block, "shared_experts", None)
    child.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    with torch.no_grad():
        assert block(torch.randn(2, 0, HIDDEN)).shape == (2, 0, HIDDEN)
    assert len(seen) == 1


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_a_runner_that_overwrites_its_input_unannounced_is_caught(monkeypatch, fused):
    inputs = let_runners_overwrite(monkeypatch, says=False)
    model, ids = build("qwen2_moe"), tokens()
    fuse(model) if fused else model.set_experts_implementation("sgl_moe_jit")
    model(ids)
    assert inputs  # overwritten, and nobody looked
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_MUTATION", "1")
    with pytest.raises(RuntimeError, match=r"runner 'grouped_mm': .* and changed 14 of 14 rows"):
        model(ids)


@torch.no_grad()
def test_layers_of_one_model_can_be_copied_one_by_one():
    model, x = build("qwen3_moe"), torch.randn(1, 5, HIDDEN)
    fuse(model)
    block = list(moe_blocks(model).values())[-1]
    out, twin = block(x), copy.deepcopy(block)
    for parameter in block.parameters():
        parameter.zero_()
    assert torch.equal(twin(x), out)
    assert type(twin).__name__ == "FusedQwen3MoeSparseMoeBlock"
