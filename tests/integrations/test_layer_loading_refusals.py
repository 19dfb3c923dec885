# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers blocks that are not loaded, and the reason given."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers import fuse_shared_experts
from sgl_moe_jit.integrations.transformers.block_table import (
    ROUTED,
    ROUTED_ONLY,
    forward_is_known,
)
from sgl_moe_jit.integrations.transformers.layer_loading import load_block

from .tiny_models import build, last_block, moe_blocks


class Wrapped(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, *args):
        return self.base(*args)


def _own_block():
    return Wrapped(last_block("deepseek_v3"))


def _fused():
    block = last_block("deepseek_v3")
    fuse_shared_experts(block)
    return block


def _hooked():
    block = last_block("deepseek_v3")
    block.register_forward_hook(lambda *args: None)
    return block


def _hooked_experts():
    block = last_block("deepseek_v3")
    block.experts.register_forward_hook(lambda *args: None)
    return block


def _patched():
    block = last_block("deepseek_v3")
    block.forward = lambda x: x
    return block


def _expert_parallel():
    block = last_block("deepseek_v3")
    block.experts._is_expert_parallel = True
    return block


def _adapted_experts():
    block = last_block("deepseek_v3")
    block.experts = Wrapped(block.experts)
    return block


def _other_forward():
    block = last_block("qwen3_moe")
    cls = type(block)
    block.__class__ = type(cls.__name__, (cls,), {"__module__": "elsewhere"})
    return block


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_own_block, "block: expected one of .*DeepseekV3MoE.*, got .*Wrapped"),
        (_fused, "block: expected one of .*, got .*FusedDeepseekV3MoE"),
        (_hooked, "DeepseekV3MoE: expected no hooks, which would be lost"),
        (_hooked_experts, "DeepseekV3Experts: expected no hooks, which would be lost"),
        (_patched, "DeepseekV3MoE: expected its own forward, got one set on the instance"),
        (_expert_parallel, "_is_expert_parallel: expected False, got True; load the whole layer"),
        (_adapted_experts, "Wrapped.has_gate: expected True or False, got None"),
        (_other_forward, r"block: expected transformers\.models\.qwen3_moe.*, got elsewhere"),
        (lambda: next(iter(moe_blocks(build("mixtral")).values())), "got .*MixtralSparseMoeBlock"),
    ],
)
def test_what_would_lose_something_is_refused_with_the_reason(make, why):
    with pytest.raises(UnsupportedError, match=why):
        load_block(make())


def test_a_forward_that_does_more_is_not_taken_for_the_known_one(monkeypatch):
    block = last_block("qwen3_moe")
    stock = type(block).forward

    def doubled(self, hidden_states):
        batch_size, length, hidden = hidden_states.shape
        flat = hidden_states.view(-1, hidden)
        _, weights, ids = self.gate(flat)
        return 2 * self.experts(flat, ids, weights).reshape(batch_size, length, hidden)

    assert set(doubled.__code__.co_names) == set(stock.__code__.co_names)
    monkeypatch.setattr(type(block), "forward", doubled)
    with pytest.raises(UnsupportedError, match="is not the one known here"):
        load_block(block)


def test_every_listed_class_of_the_installed_version_is_accepted():
    accepted = 0
    for name, folder in ROUTED_ONLY.items():
        path = f"transformers.models.{folder}.modeling_{folder}"
        try:
            module = __import__(path, fromlist=[name])
        except ModuleNotFoundError:
            continue  # of another version
        assert forward_is_known(getattr(module, name), ROUTED), name
        accepted += 1
    assert accepted >= 4
