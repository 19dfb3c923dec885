# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which of transformers' own routers are known, by what their forward computes."""

from __future__ import annotations

import inspect
import re
import textwrap
from importlib import import_module

import pytest
import torch

from sgl_moe_jit.integrations.transformers.block_table import (
    ROUTED_ONLY,
    SUPPORTED,
    modeling_module,
)
from sgl_moe_jit.integrations.transformers.gate_table import STYLES, style_of_gate

# Whose routers do something else: no groups at times, logits of their own, softmax in the
# model's dtype.
UNKNOWN = {"AXK2MoE", "Kolibri1SparseMoeBlock", "Mistral4MoE", "MistralLarge4TextMoE"}


def gate_class(block):
    module = import_module(modeling_module(block))
    made = inspect.getsource(getattr(module, block).__init__)
    return getattr(module, re.search(r"self\.gate = (\w+)\(", made).group(1))


@pytest.mark.parametrize("block", [*SUPPORTED, *ROUTED_ONLY])
def test_the_routers_of_known_blocks(block):
    pytest.importorskip(modeling_module(block))  # the oldest transformers lacks some
    cls = gate_class(block)
    assert (style_of_gate(cls, cls.forward) is None) == (block in UNKNOWN)


# Each compiles to the same names.
@pytest.mark.parametrize(
    ("block", "was", "becomes"),
    [
        ("DeepseekV3MoE", "1e-20", "1e-19"),
        ("DeepseekV3MoE", "1e-20", "0.0"),
        ("DeepseekV3MoE", "topk_weights * self", "topk_weights + self"),
        ("DeepseekV3MoE", ".topk(2, dim", ".topk(1, dim"),
        ("DeepseekV3MoE", 'float("-inf")', 'float("inf")'),
        ("DeepseekV3MoE", "scores.gather(", "scores_for_choice.gather("),
        ("DeepseekV3MoE", "scores + self.e_", "scores - self.e_"),
        ("DeepseekV2Moe", "topk_weights * self", "topk_weights / self"),
        ("DeepseekV2Moe", '== "greedy"', '== "plain"'),
        ("DeepseekV2Moe", "~score_mask", "score_mask"),
        ("Qwen3MoeSparseMoeBlock", "dim=-1, keepdim=True", "dim=0, keepdim=True"),
        ("Qwen3MoeSparseMoeBlock", "if self.norm", "if not self.norm"),
        ("Qwen3VLMoeTextSparseMoeBlock", "router_top_value /=", "router_top_value *="),
    ],
)
def test_a_forward_with_the_same_names_that_computes_something_else(block, was, becomes):
    cls = gate_class(block)
    source = textwrap.dedent(inspect.getsource(cls.forward))
    assert was in source
    scope = dict(vars(import_module(modeling_module(block))))
    exec(compile(source.replace(was, becomes), block, "exec"), scope)
    changed = scope["forward"]
    assert set(changed.__code__.co_names) == set(cls.forward.__code__.co_names)
    assert style_of_gate(cls, changed) is None


def test_a_class_from_elsewhere_is_not_known():
    cls = gate_class("DeepseekV3MoE")
    mine = type("DeepseekV3TopkRouter", (cls,), {"__module__": __name__})
    assert style_of_gate(mine, mine.forward) is None
    assert style_of_gate(torch.nn.Linear, torch.nn.Linear.forward) is None


def test_every_style_has_cases_of_its_own():
    assert len({style.names for style in STYLES}) == len(STYLES)
    assert all(style.cases for style in STYLES)
