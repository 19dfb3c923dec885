# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``DeepEPDispatcher`` against recorded signatures and a buffer that keeps, or breaks, its word."""

import pytest
import torch

from sgl_moe_jit.ep.deepep import DeepEPDispatcher
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from tests.ep.deepep_fake import RECORDED, VERSIONS, FakeBuffer
from tests.ep.ep_cases import (
    FixedGate,
    H,
    SharedMlp,
    Whole,
    check_output,
    choose,
    home_expand,
    random,
)
from tests.ep.thread_ranks import all_ranks, run_ranks

BF16 = torch.bfloat16
MODES = {
    "normal": {},
    "worst": {"num_worst_tokens": 16},
    "low_latency": {"mode": "low_latency", "num_max_dispatch_tokens_per_rank": 7},
}


def test_the_versions_recorded_are_those_the_adapter_names():
    assert VERSIONS == ["sgl-deep-ep 0.1.0", "sgl-deep-ep 0.1.2.post1"]
    defaults = RECORDED[VERSIONS[0]]["low_latency_dispatch"].parameters
    assert defaults["use_fp8"].default is True  # so that the adapter has to say no


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [(5, 0, 7), (0, 0, 4), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_block_over_deepep_equals_the_whole(monkeypatch, version, mode, tokens, factor):
    layout = EpLayout(6, ep_size=3)
    whole = Whole.make(6, dtype=BF16)

    def call(group):
        rank = group.rank()
        x = (random(20 + rank, tokens[rank], H) * H**0.5).to(BF16)
        ids, weights = choose(rank, tokens[rank], 6, 3, absent=0.2)
        ids[1:2] = -1  # a token that goes nowhere
        buffer, mlp = FakeBuffer(group, version), SharedMlp(whole)
        dispatcher = DeepEPDispatcher(buffer, layout.num_local, **MODES[mode])
        block = SharedExpertMoEBlock(
            FixedGate(ids, weights, factor), whole.fused(layout, rank), mlp, shared_is_fused=True
        )
        path = ExpertParallelPath(dispatcher, home_expand(layout, rank))
        output = block.forward_deepep(x, path)
        assert mlp.calls == 0
        expected = ["low_latency_dispatch", "low_latency_combine"]
        if mode != "low_latency":
            expected = ["get_dispatch_layout", "dispatch", "combine"]
        assert buffer.calls == expected  # also on a rank without tokens
        return x, ids, weights, output

    for x, ids, weights, output in all_ranks(monkeypatch, 3, call)[0]:
        # the transport sums once, the factor rounds again
        check_output(output, whole, x, ids, weights, factor, roundings=12)
        assert torch.equal(output[1:2], torch.zeros_like(output[1:2]))


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_back_is_a_deferred_output_of_all_slots(monkeypatch, mode):
    def call(group):
        dispatcher = DeepEPDispatcher(FakeBuffer(group), 2, **MODES[mode])
        ids = torch.tensor([[0, 1, -1], [-1, -1, -1]], dtype=torch.int32)
        rows = dispatcher.dispatch(torch.ones(2, H, dtype=BF16), ids, torch.ones(2, 3))
        if (
            mode == "low_latency"
        ):  # a row in each expert's part of the buffer, and nothing behind it
            unused = [-1] * 6
            assert rows.topk_output.topk_ids.flatten().tolist() == [0, *unused, 1, *unused]
        return dispatcher.combine(torch.zeros_like(rows.hidden_states), rows)

    (returned,), _ = all_ranks(monkeypatch, 1, call)
    assert returned.top_k == 3 and returned.expert_weights is None
    assert returned.expanded_idx_to_permuted_idx.tolist() == [[0, -1, -1], [-1, -1, -1]]


class OtherBuffer:
    """Has the methods of another class of DeepEP."""

    group_size = 2

    def dispatch(self): ...

    def combine(self): ...


@pytest.mark.parametrize(
    ("buffer", "options", "kind", "text"),
    [
        (
            OtherBuffer,
            {},
            UnsupportedError,
            r"with .get_dispatch_layout for mode 'normal', got Oth",
        ),
        (
            OtherBuffer,
            MODES["low_latency"],
            UnsupportedError,
            r"with .low_latency_dispatch for mode",
        ),
        (
            None,
            {"mode": "fast"},
            ValueError,
            "mode: expected 'normal' or 'low_latency', got 'fast'",
        ),
        (
            None,
            {"num_local_experts": 0},
            ValueError,
            "num_local_experts: expected at least 1, got 0",
        ),
        (
            None,
            {"mode": "low_latency"},
            ValueError,
            "expected at least 1 in mode 'low_latency', got",
        ),
        (
            None,
            {"num_max_dispatch_tokens_per_rank": 4},
            ValueError,
            "expected None in mode 'normal'",
        ),
        (
            None,
            {"num_worst_tokens": -1},
            ValueError,
            "num_worst_tokens: expected 0, or in mode 'nor",
        ),
        (
            None,
            MODES["low_latency"] | {"num_worst_tokens": 4},
            ValueError,
            "num_worst_tokens: expe",
        ),
    ],
)
def test_what_the_constructor_refuses(monkeypatch, buffer, options, kind, text):
    def call(group):
        made = FakeBuffer(group) if buffer is None else buffer()
        DeepEPDispatcher(made, **{"num_local_experts": 2} | options)

    _, errors, _ = run_ranks(monkeypatch, 1, call)
    with pytest.raises(kind, match=text):
        raise errors[0]


@pytest.mark.parametrize(
    ("options", "tokens", "dtype", "kind", "text"),
    [
        (
            {},
            3,
            torch.float32,
            TypeError,
            "hidden_states: expected bfloat16 for DeepEP, got torch.f",
        ),
        (
            {"max_top_k": 1},
            3,
            BF16,
            ValueError,
            "topk_ids: expected at most max_top_k, 1 slots a t",
        ),
        (
            MODES["low_latency"],
            8,
            BF16,
            ValueError,
            "hidden_states: expected at most 7 tokens, num",
        ),
    ],
)
def test_what_the_buffer_was_not_made_for_is_not_sent(
    monkeypatch, options, tokens, dtype, kind, text
):
    def call(group):
        buffer = FakeBuffer(group)
        try:
            DeepEPDispatcher(buffer, 2, **options).dispatch(
                torch.ones(tokens, H, dtype=dtype),
                torch.zeros(tokens, 2).int(),
                torch.ones(tokens, 2),
            )
        finally:
            assert not buffer.calls

    _, errors, _ = run_ranks(monkeypatch, 1, call)
    with pytest.raises(kind, match=text):
        raise errors[0]


def test_an_id_of_no_rank_is_not_sent(monkeypatch):
    def call(group):
        buffer = FakeBuffer(group)
        try:
            ids = torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)
            x, weights = torch.ones(2, H, dtype=BF16), torch.ones(2, 2)
            DeepEPDispatcher(buffer, 2).dispatch(x, ids, weights)
        finally:
            assert not buffer.calls

    _, errors, _ = run_ranks(monkeypatch, 1, call)
    with pytest.raises(ValueError, match="topk_ids: expected ids below 2, ep_size"):
        raise errors[0]


def test_experts_answer_in_bfloat16(monkeypatch):
    def call(group):
        dispatcher = DeepEPDispatcher(FakeBuffer(group), 2)
        ids = torch.zeros(1, 1).int()
        rows = dispatcher.dispatch(torch.ones(1, H, dtype=BF16), ids, torch.ones(1, 1))
        dispatcher.combine(rows.hidden_states.float(), rows)

    _, errors, _ = run_ranks(monkeypatch, 1, call)
    with pytest.raises(TypeError, match="expert_output: expected bfloat16 for DeepEP"):
        raise errors[0]
