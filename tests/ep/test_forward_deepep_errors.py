# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What stops a block before its dispatch: refused by name, and the other ranks do not wait."""

import itertools

import pytest
import torch

from sgl_moe_jit.ep.balance import WaterfillBalancer
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.prepared_layer import PreparedMoE
from sgl_moe_jit.moe.router import Router
from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.topk import StandardTopKOutput
from tests.ep.ep_cases import FixedGate, H, Whole, choose, home_expand, random
from tests.ep.thread_ranks import all_ranks, let_balancers_meet, run_ranks
from tests.moe.layer_cases import FakeRunner, fake_config

LAYOUT = EpLayout(4)
WHOLE = Whole.make(4)
IDS, WEIGHTS = choose(1, 3, 4, 2)


class Reducing:
    """A group of two that nothing may reduce over."""

    def rank(self):
        return 0

    def size(self):
        return 2


def attempt(
    monkeypatch,
    *,
    x="right",
    experts=None,
    fused=True,
    expand="home",
    gate=None,
    grad=False,
    **mode,
):
    """Run a block of one rank, with one part exchanged, and raise what it raises."""

    def call(group):
        block = SharedExpertMoEBlock(
            gate or FixedGate(IDS, WEIGHTS),
            experts or WHOLE.fused(LAYOUT, 0),
            shared_is_fused=fused,
        )
        path = ExpertParallelPath(
            TorchDispatcher(group, LAYOUT.num_local, **mode),
            home_expand(LAYOUT, 0) if expand == "home" else expand,
        )
        with torch.set_grad_enabled(grad):
            right = random(5, 3, H).requires_grad_(grad)
            block.forward_deepep(right if x == "right" else x, path)

    _, errors, world = run_ranks(monkeypatch, 1, call)
    assert [rows for _, rows, _ in world.log] == [(1,)]  # the notice that there is no dispatch
    raise errors[0]


def placed(**options):
    return FusedMoE.from_w13_w2(
        *(p.detach() for p in WHOLE.fused(LAYOUT, 0).parameters()), **options
    )


def test_experts_that_are_no_layer(monkeypatch):
    with pytest.raises(TypeError, match="experts: expected a FusedMoE or PreparedMoE, got Linear"):
        attempt(monkeypatch, experts=torch.nn.Linear(2, 2))


def test_a_path_that_is_none():
    block = SharedExpertMoEBlock(FixedGate(IDS, WEIGHTS), WHOLE.fused(LAYOUT, 0))
    with pytest.raises(TypeError, match="path: expected an ExpertParallelPath, got NoneType"):
        block.forward_deepep(random(5, 3, H), None)


def test_an_expander_goes_with_fused_shared_experts(monkeypatch):
    with pytest.raises(ValueError, match=r"expand: expected one, .*True, got no expander"):
        attempt(monkeypatch, expand=None)
    with pytest.raises(ValueError, match=r"expand: expected None, .*False, got an expander"):
        attempt(monkeypatch, fused=False)


def test_a_layer_without_the_shared_slot(monkeypatch):
    with pytest.raises(ValueError, match=r"experts: expected 5 on this rank, .*, got 4"):
        attempt(monkeypatch, experts=WHOLE.fused(EpLayout(4, num_shared=0), 0))


def test_a_layer_that_would_be_reduced(monkeypatch):
    with pytest.raises(ValueError, match="experts: expected no group to reduce over, got ep 2"):
        attempt(monkeypatch, experts=placed(ep_group=Reducing()))


def test_a_runner_that_cannot_defer(monkeypatch):
    config = fake_config(experts=5)
    experts = PreparedMoE(FakeRunner([], defers=False), config)
    with pytest.raises(UnsupportedError, match=r"un-finalized rows, and .*sum_at='experts'"):
        attempt(monkeypatch, experts=experts)


def test_a_factor_that_would_erase_the_shared_experts(monkeypatch):
    with pytest.raises(ValueError, match="routed_scaling_factor: expected other than 0"):
        attempt(monkeypatch, gate=FixedGate(IDS, WEIGHTS, 0.0))


def test_weights_on_the_input(monkeypatch):
    gate = FixedGate(IDS, WEIGHTS)
    gate.output = StandardTopKOutput(WEIGHTS[:, :1], IDS[:, :1], 1.0, weight_on_input=True)
    with pytest.raises(ValueError, match="expected weights on the experts' output"):
        attempt(monkeypatch, gate=gate)


def test_gradients(monkeypatch):
    with pytest.raises(RuntimeError, match=r"a dispatch does not carry it; call under torch.no_gr"):
        attempt(monkeypatch, grad=True)


def test_an_expander_for_other_slots(monkeypatch):
    """Its ids would be other experts', silently."""
    with pytest.raises(ValueError, match=r"expand: expected a layout of 5 slots a rank, .*, got 4"):
        attempt(monkeypatch, expand=HomeExpander(EpLayout(3), 0))


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("sum_at", ["source", "experts"])
def test_what_stops_one_rank_stops_all(monkeypatch, sum_at, culprit):
    """An id that is no expert on one rank: its expander raises, and the others do not wait."""
    layout, whole = EpLayout(6, ep_size=3), Whole.make(6)

    def call(group):
        rank = group.rank()
        ids, weights = choose(rank, 3, 6, 2)
        if rank == culprit:
            ids[1, 0] = 6
        block = SharedExpertMoEBlock(
            FixedGate(ids, weights), whole.fused(layout, rank), shared_is_fused=True
        )
        path = ExpertParallelPath(
            TorchDispatcher(group, layout.num_local, sum_at=sum_at), HomeExpander(layout, rank)
        )
        block.forward_deepep(random(5, 3, H), path)

    _, errors, _ = run_ranks(monkeypatch, 3, call)
    for rank, error in enumerate(errors):
        text = (
            "topk_ids: expected ids below 6" if rank == culprit else f"and rank {culprit} stopped"
        )
        assert isinstance(error, ValueError) and text in str(error), error


def fails(*_):
    raise RuntimeError("of this rank alone")


def balancer(layout, group, kind):
    choices = {"mode": "exact_restricted", "max_tokens_per_rank": 4}
    options = {} if kind == "static" else {"dynamic": True, "group": group}
    return WaterfillBalancer(
        layout, group.rank(), **options, **(choices if kind == "choices" else {})
    )


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *itertools.product(
            ("static", "counts", "choices"), ("hidden", "layer", "gate", "table", "factor")
        ),
        ("choices", "expander"),  # it alone refuses a number of tokens
    ],
)
def test_what_stops_one_rank_before_a_balancer_stops_all(monkeypatch, kind, where, culprit):
    """The others are in the balancer's collective: it is joined first, then they are told."""
    layout, whole = EpLayout(6, ep_size=3), Whole.make(6)
    let_balancers_meet(monkeypatch)

    def call(group):
        rank, here = group.rank(), where if group.rank() == culprit else ""
        gate = Router(RouterConfig(6, 2, "softmax"), hidden_dim=H)  # says K, asked or not
        if here == "gate":
            gate.register_forward_pre_hook(fails)
        if here == "factor":
            gate = FixedGate(*choose(rank, 3, 6, 2), 0.0)
        if here == "expander":
            ids, weights = choose(rank, 3, 6, 2)
            gate = FixedGate(torch.cat((ids, ids)), torch.cat((weights, weights)))
        block = SharedExpertMoEBlock(
            gate,
            whole.fused(EpLayout(6, ep_size=3, num_shared=0) if here == "layer" else layout, rank),
            shared_is_fused=True,
        )
        path = ExpertParallelPath(
            TorchDispatcher(group, layout.num_local),
            balancer(layout, group, kind),
            to_physical=fails if here == "table" else None,
        )
        rows = 6 if here == "expander" else 3
        block.forward_deepep(random(5, rows, H + (here == "hidden")), path)

    _, errors, world = run_ranks(monkeypatch, 3, call)
    assert len(world.log) == (3 if kind == "static" else 6)
    own = {
        "hidden": rf"hidden_states: expected [..., {H}]",
        "layer": "experts: expected 3 on this rank",
        "factor": "routed_scaling_factor: expected other than 0",
        "expander": "topk_ids: expected at most max_tokens_per_rank",
    }
    for rank, error in enumerate(errors):
        text = f"and rank {culprit} stopped"
        if rank == culprit:
            text = own.get(where, "of this rank alone")
        else:
            assert isinstance(error, ValueError), error
        assert text in str(error), (rank, error)


@pytest.mark.parametrize("called_before", [False, True])
def test_a_gate_that_does_not_say_k(monkeypatch, called_before):
    """Choices of unknown K cannot be joined: the own error at once, not behind a wait of its own.

    After one call K is known.
    """
    layout, whole = EpLayout(6, ep_size=3), Whole.make(6)
    let_balancers_meet(monkeypatch)

    def call(group):
        rank = group.rank()
        gate = FixedGate(*choose(rank, 3, 6, 2))
        block = SharedExpertMoEBlock(gate, whole.fused(layout, rank), shared_is_fused=True)
        path = ExpertParallelPath(
            TorchDispatcher(group, layout.num_local), balancer(layout, group, "choices")
        )
        if called_before:
            block.forward_deepep(random(5, 3, H), path)
        elif rank != 1:
            return  # they would wait
        if rank == 1:
            gate.register_forward_pre_hook(fails)
        error, text = (RuntimeError, "alone") if rank == 1 else (ValueError, "and rank 1 stopped")
        with pytest.raises(error, match=text):
            block.forward_deepep(random(5, 3, H), path)

    _, world = all_ranks(monkeypatch, 3, call)
    assert bool(world.log) == called_before


def test_a_gate_of_a_model_says_k(monkeypatch):
    """By the attribute that transformers' gates have; nothing is known of it otherwise."""
    layout, whole = EpLayout(2, ep_size=1), Whole.make(2)
    let_balancers_meet(monkeypatch)

    def call(group):
        gate = FixedGate(*choose(0, 3, 2, 2))
        gate.top_k = 2
        gate.register_forward_pre_hook(fails)
        block = SharedExpertMoEBlock(gate, whole.fused(layout, 0), shared_is_fused=True)
        path = ExpertParallelPath(
            TorchDispatcher(group, layout.num_local), balancer(layout, group, "choices")
        )
        with pytest.raises(RuntimeError, match="alone"):
            block.forward_deepep(random(5, 3, H), path)

    _, world = all_ranks(monkeypatch, 1, call)
    assert [columns for _, _, columns in world.log][:1] == [2]
    assert len(world.log) == 2


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (None, TypeError, "expected a Tensor, got NoneType"),
        (torch.tensor(1.0), ValueError, rf"expected \[..., {H}\], got \(\)"),
        (torch.zeros(3, 2 * H), ValueError, rf"expected \[..., {H}\], got \(3, 32\)"),
        (torch.zeros(3, H, dtype=torch.int64), TypeError, "expected a floating dtype"),
    ],
)
def test_hidden_states_of_another_kind(monkeypatch, x, kind, text):
    with pytest.raises(kind, match=f"^hidden_states: {text}"):
        attempt(monkeypatch, x=x)
