# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A layer keeps no weight alive beside its parameters, whoever replaced one, before a next call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.utils import parametrize

from tests.moe.layer_cases import make_layer
from tests.moe.runner_cases import make_input, make_topk

pytestmark = pytest.mark.field_report("A20")


def _assign(layer):
    layer.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)


def _set(layer):
    for name, old in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(old.detach().clone()))


@pytest.mark.parametrize("replace", [_assign, _set])
@pytest.mark.parametrize("defer", [True, False])
@torch.no_grad()
def test_replaced_parameters_are_let_go_before_the_next_call(replace, defer):
    layer, x, topk = make_layer(), make_input(3), make_topk(3)
    want = layer(x, topk)
    layer(x, topk, defer=defer)
    replaced = [weakref.ref(p) for p in layer.parameters()]
    replace(layer)
    gc.collect()
    assert [r() for r in replaced] == [None] * len(replaced)
    assert torch.equal(layer(x, topk), want)


@torch.no_grad()
def test_what_was_made_for_one_call_is_gone_after_it():
    """The merged weight of an adapter, and what functional_call put in place."""
    made, layer, x, topk = [], make_layer(), make_input(3), make_topk(3)
    plain = layer(x, topk)

    class Merge(torch.nn.Module):
        def forward(self, weight):
            merged = 2 * weight
            made.append(weakref.ref(merged))
            return merged

    parametrize.register_parametrization(layer, "w2_weight", Merge())
    assert torch.equal(layer(x, topk), 2 * plain)
    parametrize.remove_parametrizations(layer, "w2_weight", leave_parametrized=False)
    state = {name: 2 * p for name, p in layer.named_parameters()}
    made += map(weakref.ref, state.values())
    torch.func.functional_call(layer, state, (x, topk))
    del state
    gc.collect()
    assert len(made) >= 4 and not any(r() is not None for r in made)
    assert torch.equal(layer(x, topk), plain)
