# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A fused block remembers which runner serves its experts, and none of their weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.integrations.transformers import fuse_shared_experts as fuse
from sgl_moe_jit.integrations.transformers import unfuse_shared_experts as unfuse
from sgl_moe_jit.moe import runner_choice

from .tiny_models import BLOCK_ROUNDINGS, HIDDEN, assert_close, last_block


def _odd_rows(experts):
    down = experts.down_proj
    wide = torch.empty(*down.shape[:2], 2 * down.shape[2] + 1)
    down.data = wide[..., : down.shape[2]].copy_(down.data)


def _off_by_an_element(experts):
    up = experts.gate_up_proj
    flat = torch.empty(up.numel() + 1)[1:]
    experts.gate_up_proj = torch.nn.Parameter(flat.view(up.shape).copy_(up.data))


@pytest.fixture
def block():
    block = last_block("deepseek_v3")
    fuse(block)
    return block


@torch.no_grad()
def test_it_is_found_once_and_again_for_another_form(block, monkeypatch):
    names, select = [], runner_choice.select_runner

    def counted(name, config):
        selection = select(name, config)
        names.append(selection.entry.name)
        return selection

    monkeypatch.setattr(runner_choice, "select_runner", counted)
    x = torch.randn(2, 3, HIDDEN)
    want = block(x)
    block.load_state_dict({k: v.clone() for k, v in block.state_dict().items()}, assign=True)
    assert torch.equal(block(x), want) and names == ["grouped_mm"]
    for change in (_odd_rows, _off_by_an_element):
        plain = copy.deepcopy(block.experts)
        change(block.experts)
        assert_close(block(x), want, BLOCK_ROUNDINGS, change.__name__)
        block.experts = plain
        assert torch.equal(block(x), want)
    assert names == ["grouped_mm", *2 * ["native", "grouped_mm"]]
    assert torch.equal(block.double()(x.double()).float(), block(x.double()).float())
    assert names[-1] == "native"


@torch.no_grad()
def test_copies_and_an_unfused_block_carry_nothing_of_it(block):
    block(torch.randn(2, 3, HIDDEN))
    assert block._known_choice is not None
    for again in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert "_known_choice" not in again(block).__dict__
    unfuse(block)
    assert "_known_choice" not in block.__dict__


def _jit_trace(block, x):
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace: expected torch\.compile or"):
        torch.jit.trace(block, (x,), check_trace=False)


def _symbolic(block, x):
    def call(state, x):
        return functional_call(block, state, (x,))

    make_fx(call, tracing_mode="symbolic")(block.state_dict(), x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", [_jit_trace, _symbolic])
@torch.no_grad()
def test_a_trace_as_the_first_call_leaves_no_size_of_its_own(block, trace):
    """Tracers outside ``torch.compile`` do not count as compiling; their sizes are no ints."""
    x = torch.randn(2, 3, HIDDEN)
    want = copy.deepcopy(block)(x)
    trace(block, x)
    assert block._known_choice is None
    assert torch.equal(block(x), want) and block._known_choice is not None


@pytest.mark.field_report("A20")
@torch.no_grad()
def test_a_hook_in_front_of_the_experts_may_put_other_weights_in_place(block):
    """As weight_norm of old did, and as whoever gathers weights for the length of a call does."""
    x, experts = torch.randn(2, 3, HIDDEN), block.experts
    shared = block.shared_experts(x)
    plain = block(x) - shared

    def double(module, args):
        module.down_proj = torch.nn.Parameter(2 * module.down_proj)

    experts.register_forward_pre_hook(double)
    assert_close(block(x), shared + 2 * plain, 2 * BLOCK_ROUNDINGS, "first call")
    assert_close(block(x), shared + 4 * plain, 2 * BLOCK_ROUNDINGS, "second call")
