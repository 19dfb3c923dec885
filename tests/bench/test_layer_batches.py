# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What ``bench layer`` and ``bench memory`` go through, and the records they make of it."""

import gc
import weakref

import pytest
import torch

from sgl_moe_jit.bench import layer, layer_cases, memory
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Outcome
from sgl_moe_jit.bench.layer_cases import LayerCase
from sgl_moe_jit.bench.options import Options

SHAPES = [FinalizeCase(name, 64, 64, 2, 8) for name in ("one", "two")]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    settings = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    kind = ("deepseek_v3", "DeepseekV3MoE")
    cases = {shape.name: LayerCase(shape, 4, 16, kind, settings) for shape in SHAPES}
    monkeypatch.setattr(layer_cases, "LAYERS", cases)


def test_a_layer_is_gone_before_the_next_is_made(monkeypatch):
    alive, seen = [], []
    make = layer_cases.make_stock

    def watched(*arguments):
        gc.collect()
        assert not any(ref() is not None for ref in alive)
        stock = make(*arguments)
        alive.append(weakref.ref(stock))
        return stock

    monkeypatch.setattr(layer_cases, "make_stock", watched)
    for batch in layer_cases.batches(SHAPES, (3, 5), "cpu"):
        seen.append((batch.case.name, *batch.x.shape))
        assert batch.block.experts.gate_up_proj is batch.stock.experts.gate_up_proj
        del batch
    assert seen == [("one", 3, 64), ("one", 5, 64), ("two", 3, 64), ("two", 5, 64)]
    assert len(alive) == 2


@pytest.mark.parametrize("subject", [layer, memory])
def test_records_of_every_shape(monkeypatch, subject):
    """On a CPU, each contestant checked against the oracle and called once, none timed."""

    class Once:
        def enter(self, title, makers):
            entered = {name: make() for name, make in makers.items()}
            for contestant in entered.values():
                contestant.check()
            return entered

        def on_cuda(self, title, makers, *, captures):
            return {name: Outcome(None, None) for name in self.enter(title, makers)}

    on_cpu = layer_cases.batches
    monkeypatch.setattr(subject, "batches", lambda cases, tokens: on_cpu(cases, tokens, "cpu"))
    monkeypatch.setattr(memory, "peak_bytes", lambda call: call().numel())
    chosen = ("sgl_moe_jit", "transformers")
    options = Options(SHAPES, (3,), ("hot",), {}, chosen, "9.0a")
    shapes = list(subject.bench(options, Once()))
    assert [[(r.case, r.num_tokens, r.provider) for r in records] for records in shapes] == [
        [(shape.name, 3, name) for name in chosen] for shape in SHAPES
    ]
    for record in (record for records in shapes for record in records):
        assert record.note == "4 local experts of width 16, 1 shared"
        assert record.subject == subject.__name__.rpartition(".")[2]
        assert getattr(record, "peak_bytes", None) == (3 * 64 if subject is memory else None)
    assert torch.is_grad_enabled()
