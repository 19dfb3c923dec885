# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What ``TorchDispatcher`` refuses: alone before anything is sent, or on all ranks together."""

import dataclasses
import threading

import pytest
import torch

from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.moe.deferred import DeferredFinalizeOutput
from tests.ep.dispatch_cases import MODE_NAMES, MODES, batch, fake_experts
from tests.ep.thread_ranks import run_ranks


@pytest.mark.parametrize("mode", MODES[:2], ids=MODE_NAMES[:2])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_bad_id_on_one_rank_is_refused_on_all(monkeypatch, mode, culprit):
    def call(group):
        x, ids, weights = batch(group.rank(), 3, 3, 2, 2)
        if group.rank() == culprit:
            ids[1] = 6
        TorchDispatcher(group, 2, **mode).dispatch(x, ids, weights)

    _, errors, _ = run_ranks(monkeypatch, 3, call)
    for error in errors:
        assert isinstance(error, ValueError)
        assert f"out of range: 2 on rank {culprit}" in str(error)


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (lambda x, i, w: (x.bfloat16(), i, w), {}, r"hidden_states.dtype: .* got \[1, 0\] by rank"),
        (
            lambda x, i, w: (x[:, :4], i, w),
            {},
            r"hidden_states.shape\[1\]: .* got \[8, 4\] by",
        ),
        (lambda x, i, w: (x, i[:, :1], w[:, :1]), {}, r"topk_ids.shape\[1\]: .* got \[2, 1\] by"),
        (
            lambda x, i, w: (x, i, w),
            {"num_local_experts": 3},
            r"num_local_experts: .* got \[2, 3",
        ),
        (lambda x, i, w: (x, i, w), {"sum_at": "experts"}, r"sum_at: expected the same on every"),
    ],
)
def test_ranks_that_disagree_are_told_so_together(monkeypatch, change, options, text):
    def call(group):
        x, ids, weights = batch(group.rank(), 3, 2, 2, 2, torch.float16)
        given = {"num_local_experts": 2}
        if group.rank() == 1:
            (x, ids, weights), given = change(x, ids, weights), given | options
        TorchDispatcher(group, **given).dispatch(x, ids, weights)

    _, errors, _ = run_ranks(monkeypatch, 2, call)
    for error in errors:
        with pytest.raises(ValueError, match=text):
            raise error


def test_no_group_says_how_to_have_one():
    with pytest.raises(TypeError, match=r"group: expected a process group, .*init_process_group"):
        TorchDispatcher(None, 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_local_experts": 0}, ValueError, "num_local_experts: expected at least 1, got 0"),
        ({"sum_at": "home"}, ValueError, "sum_at: expected 'source' or 'experts', got 'home'"),
        ({"max_tokens_per_rank": 4}, ValueError, "expected None with sum_at='source'"),
        (
            {"max_tokens_per_rank": 0, "sum_at": "experts"},
            ValueError,
            "max_tokens_per_rank: expected at least 1",
        ),
        (
            {"max_tokens_per_rank": 4, "sum_at": "experts", "stage_through_host": True},
            ValueError,
            "expected None with stage_through_host",
        ),
    ],
)
def test_arguments_that_do_not_go_together(monkeypatch, arguments, kind, text):
    _, errors, _ = run_ranks(
        monkeypatch, 1, lambda group: TorchDispatcher(group, **{"num_local_experts": 2} | arguments)
    )
    with pytest.raises(kind, match=text):
        raise errors[0]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda x, i, w: (x.double(), i, w), TypeError, "hidden_states: expected bfloat16, float1"),
        (lambda x, i, w: (x[0], i, w), ValueError, r"hidden_states: expected \[num_tokens, hidden"),
        (lambda x, i, w: (x, i.short(), w), TypeError, "topk_ids: expected int32 or int64, got to"),
        (lambda x, i, w: (x, i[:2], w), ValueError, r"topk_ids: expected \[3, 1 to 64\], got"),
        (lambda x, i, w: (x, i[:, :0], w[:, :0]), ValueError, r"topk_ids: expected \[3, 1 to 64"),
        (lambda x, i, w: (x, i, w.bfloat16()), TypeError, "topk_weights: expected float32, got"),
        (lambda x, i, w: (x, i, w[:, :1]), ValueError, r"topk_weights: expected \(3, 2\), got"),
        (lambda x, i, w: (x, i.to("meta"), w), ValueError, "topk_ids: expected device cpu of hid"),
        (lambda x, i, w: (x, i, w.to("meta")), ValueError, "topk_weights: expected device cpu o"),
    ],
)
def test_a_bad_argument_sends_no_row_and_the_others_do_not_wait(monkeypatch, change, kind, text):
    def call(group):
        right = batch(group.rank(), 3, 2, 2, 2)
        TorchDispatcher(group, 2).dispatch(*(change(*right) if group.rank() == 0 else right))

    _, errors, world = run_ranks(monkeypatch, 2, call)
    with pytest.raises(kind, match=text):
        raise errors[0]
    with pytest.raises(ValueError, match="expected every rank to come, and rank 0 stopped before"):
        raise errors[1]
    assert [rows for _, rows, _ in world.log] == [(1, 1)] * 2  # notices alone


def test_the_fixed_size_is_a_limit(monkeypatch):
    def call(num_tokens, add):
        def on_rank(group):
            x, ids, weights = batch(0, num_tokens, 1, 2, 2)
            mode = {"sum_at": "experts", "max_tokens_per_rank": 4}
            TorchDispatcher(group, 2, **mode).dispatch(x, ids + add, weights)

        _, errors, world = run_ranks(monkeypatch, 1, on_rank)
        assert not world.log
        raise errors[0]

    with pytest.raises(ValueError, match="expected at most max_tokens_per_rank, 4 tokens, got 5"):
        call(5, 0)
    with pytest.raises(ValueError, match="topk_ids: expected ids below 2, ep_size"):
        call(4, 2)


def test_the_experts_have_to_answer_in_the_form_asked_for(monkeypatch):
    def answer(mode, make):
        def on_rank(group):
            dispatcher = TorchDispatcher(group, 2, **mode)
            rows = dispatcher.dispatch(*batch(0, 3, 1, 2, 2))
            dispatcher.combine(make(rows), rows)

        _, errors, _ = run_ranks(monkeypatch, 1, on_rank)
        raise errors[0]

    def no_rows(rows):
        output = fake_experts(rows, 0, True)
        output.expanded_idx_to_permuted_idx.fill_(-1)
        return output

    def short(rows):
        index = torch.zeros(1, 2, dtype=torch.int32)
        return DeferredFinalizeOutput(rows.hidden_states, None, index, 2)

    def doubled(output):
        return dataclasses.replace(output, gemm2_out=output.gemm2_out.double())

    source, experts = MODES[:2]
    with pytest.raises(TypeError, match=r"expected a DeferredFinalizeOutput, .*defer=True"):
        answer(source, lambda rows: rows.hidden_states)
    with pytest.raises(TypeError, match=r"expected a tensor \[R, H\], .*defer=False"):
        answer(experts, lambda rows: fake_experts(rows, 0, True))
    with pytest.raises(ValueError, match=r"expert_output: expected \(\d, 8\), got \(\d, 4\)"):
        answer(experts, lambda rows: rows.hidden_states[:, :4])
    with pytest.raises(TypeError, match=r"expected torch\.float32 like the dispatched rows"):
        answer(experts, lambda rows: rows.hidden_states.double())
    with pytest.raises(TypeError, match=r"expected torch\.float32 like the dispatched rows"):
        answer(source, lambda rows: doubled(fake_experts(rows, 0, True)))
    with pytest.raises(ValueError, match="expected a row for each slot that was dispatched"):
        answer(source, no_rows)
    with pytest.raises(ValueError, match="expected an index of 6 slots"):
        answer(source, short)


def test_a_rank_that_stays_away_is_noticed_by_these_tests(monkeypatch):
    def call(group):
        if group.rank() == 0:
            TorchDispatcher(group, 2).dispatch(*batch(0, 3, 2, 2, 2))
        else:
            group.world.barrier.abort()

    _, errors, _ = run_ranks(monkeypatch, 2, call)
    assert isinstance(errors[0], threading.BrokenBarrierError)
