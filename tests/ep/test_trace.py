# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Routing traces: what is recorded, that nothing else changes, and files that are none."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sgl_moe_jit import (
    FusedMoE,
    PackedTopKOutput,
    Router,
    RouterConfig,
    SharedExpertMoEBlock,
    StandardTopKOutput,
)
from sgl_moe_jit.ep.trace import load_trace, record_routing

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 16, 8


def experts(**options) -> FusedMoE:
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 4
    return FusedMoE.from_w13_w2(w13, torch.randn(EXPERTS, HIDDEN, WIDTH) / 3, **options)


def router() -> Router:
    return Router(RouterConfig(EXPERTS, TOP_K, "softmax"), HIDDEN)


class Model(torch.nn.Module):
    """Two blocks, one behind a function that no hook can hang on, and a layer by itself."""

    def __init__(self):
        super().__init__()
        self.first = SharedExpertMoEBlock(router(), experts(), torch.nn.Linear(HIDDEN, HIDDEN))
        self.second = SharedExpertMoEBlock(lambda x: self.last_router(x), experts())
        self.last_router, self.last = router(), experts()

    def forward(self, x):
        x = x + self.second(x + self.first(x))
        return self.last(x, topk_output=self.last_router(x))


@torch.no_grad()
def test_it_records_what_the_layers_are_called_with_and_changes_nothing(tmp_path):
    model = Model()
    batches = [torch.randn(n, HIDDEN) for n in (5, 0, 3)]
    plain = [model(x) for x in batches]
    explained = str(model.first.explain())
    seen = []
    for layer in (model.first.experts, model.second.experts, model.last):
        hook = layer.register_forward_pre_hook(
            lambda _m, args, kwargs: seen.append((kwargs.get("topk_output") or args[1]).topk_ids),
            with_kwargs=True,
        )
        layer.undo = hook.remove
    with record_routing(model, model_name="toy") as recorder:
        recorded = [model(x) for x in batches]
        while_recording = str(model.first.explain())
    for layer in (model.first.experts, model.second.experts, model.last):
        layer.undo()
    model(batches[0])  # after the context: not recorded
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    trace = recorder.trace()
    assert (trace.model, trace.num_experts, trace.top_k) == ("toy", EXPERTS, TOP_K)
    assert [layer for layer, _ in trace.calls] == ["first", "second.experts", "last"] * 3
    assert all(np.array_equal(a, b) for (_, a), b in zip(trace.calls, seen, strict=True))
    assert while_recording == explained and "one fused finalize" in explained
    assert not model.first.gate._forward_hooks and not model.last._forward_pre_hooks

    path = tmp_path / "new" / "toy.npz"
    trace.save(path)
    again = load_trace(path)
    assert (again.model, again.num_experts, again.top_k) == ("toy", EXPERTS, TOP_K)
    for (layer, ids), (other, want) in zip(again.calls, trace.calls, strict=True):
        assert layer == other and ids.dtype == np.int16 and np.array_equal(ids, want)
    assert again.by_layer()["last"].shape == (8, TOP_K)
    first = path.read_bytes()
    trace.save(path)
    assert path.read_bytes() == first


def test_ids_that_are_no_routed_expert_become_none_and_every_format_is_read():
    layer, x = experts(), torch.randn(2, HIDDEN)
    standard = StandardTopKOutput(torch.ones(2, 2), torch.tensor([[0, -1], [EXPERTS, 7]]))
    with torch.no_grad(), record_routing(layer, model_name="one") as recorder:
        layer(x, standard)
        layer(x, PackedTopKOutput.pack(standard))
        layer(x, topk_output=router().bypass(x))
    calls = recorder.trace().calls
    assert calls[0][0] == "FusedMoE"
    for _, ids in calls[:2]:
        assert ids.tolist() == [[0, -1], [-1, 7]]
    assert calls[2][1].shape == (2, TOP_K) and calls[2][1].min() >= 0
    standard.topk_ids.zero_()  # what was recorded is a copy
    assert recorder.trace().calls[0][1].tolist() == [[0, -1], [-1, 7]]


def test_hooks_go_when_the_run_fails():
    layer = experts()
    with pytest.raises(KeyError), record_routing(layer, model_name="x"):
        raise KeyError
    assert not layer._forward_pre_hooks


def test_each_refusal_names_its_remedy():
    with (
        pytest.raises(ValueError, match="model: expected a FusedMoE or PreparedMoE in it"),
        record_routing(torch.nn.Linear(1, 1), model_name="x"),
    ):
        pass
    part = FusedMoE.from_w13_w2(
        torch.randn(4, 2 * WIDTH, HIDDEN), torch.randn(4, HIDDEN, WIDTH), expert_range=(4, 4)
    )
    with (
        pytest.raises(ValueError, match="num_experts: expected the number of routed experts"),
        record_routing(part, model_name="x"),
    ):
        pass
    with record_routing(part, model_name="x", num_experts=8) as recorder:
        with pytest.raises(ValueError, match="expected at least one call of a recorded layer"):
            recorder.trace()
        for k in (1, 2):
            part(
                torch.randn(1, HIDDEN), StandardTopKOutput(torch.ones(1, k), torch.arange(k)[None])
            )
    with pytest.raises(ValueError, match=r"expected one top_k, got \[1, 2\]"):
        recorder.trace()
    fused = SharedExpertMoEBlock(torch.nn.Identity(), experts(), shared_is_fused=True)
    with (
        pytest.raises(ValueError, match="or shared experts among them, got None"),
        record_routing(fused, model_name="x"),
    ):
        pass
    narrow = FusedMoE.from_w13_w2(torch.randn(4, 2 * WIDTH, HIDDEN), torch.randn(4, HIDDEN, WIDTH))
    model = torch.nn.ModuleList([experts(), narrow])
    with (
        pytest.raises(ValueError, match=r"layers with one number of experts, got \[4, 8\]"),
        record_routing(model, model_name="x"),
    ):
        pass
    # A router knows, whatever the layer holds.
    block = SharedExpertMoEBlock(router(), part)
    with record_routing(block, model_name="x") as recorder:
        assert recorder.num_experts == EXPERTS
    model = torch.nn.ModuleList([experts(), part])
    with pytest.raises(ValueError, match="holds a slice"), record_routing(model, model_name="x"):
        pass


def test_a_capture_is_refused(monkeypatch):
    layer = experts()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ids = StandardTopKOutput(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
    with (
        record_routing(layer, model_name="x") as recorder,
        pytest.raises(RuntimeError, match="expected an eager run, got a CUDA graph capture"),
    ):
        recorder.add("x", ids)


GOOD = {
    "format": np.array("sgl_moe_jit routing trace 1"),
    "model": np.array("m"),
    "num_experts": np.int64(8),
    "top_k": np.int64(2),
    "layers": np.array(["a", "b"]),
    "call_layer": np.array([0, 1], np.int32),
    "call_rows": np.array([1, 2]),
    "topk_ids": np.array([[0, 1], [2, 7], [-1, 3]], np.int16),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model: expected an array of this name, got only call_layer, "),
        ({"format": np.array("trace 9")}, "format: expected 'sgl_moe_jit routing trace 1', got"),
        ({"topk_ids": np.zeros((3, 2))}, "topk_ids: expected 2 dimensions of integers, got"),
        ({"topk_ids": np.zeros(6, int)}, "topk_ids: expected 2 dimensions of integers, got"),
        ({"num_experts": np.int64(0)}, "num_experts: expected at least 1, got 0"),
        ({"num_experts": np.int64(7)}, r"topk_ids: expected -1 to 6, got \(-1, 7\)"),
        ({"topk_ids": np.array([[0, -2]] * 3)}, r"topk_ids: expected -1 to 7, got \(-2, 0\)"),
        ({"top_k": np.int64(3)}, r"topk_ids: expected top_k = 3 >= 1 columns, got \(3, 2\)"),
        ({"call_layer": np.array([0, 2])}, r"call_layer: expected 0 to 1, got \[0, 2\]"),
        ({"call_layer": np.array([0])}, "call_layer: expected 2 calls, got 1"),
        ({"call_rows": np.array([4, -1])}, "call_rows: expected no number below 0, got -1"),
        ({"call_rows": np.array([1, 1])}, "topk_ids: expected 2 rows, the sum of call_rows, got 3"),
        (
            {"call_rows": np.zeros(0, int), "call_layer": np.zeros(0, int)},
            "call_rows: expected at least one call, got 0",
        ),
        ({"layers": np.array([{}], dtype=object)}, "Object arrays cannot be loaded"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "t.npz"
    arrays = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        load_trace(path)


def test_files_that_are_no_archive_are_refused(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, **GOOD)
    assert [ids.tolist() for _, ids in load_trace(path).calls] == [[[0, 1]], [[2, 7], [-1, 3]]]
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.npz: file: expected a.* \.npz archive"):
            load_trace(path)
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "absent.npz")


def test_without_numpy_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'sgl-moe-jit\[bench\]'"):
        load_trace(tmp_path / "x.npz")
