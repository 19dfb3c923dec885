# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One test an error: its kind, the argument it names, and that nothing was written."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.ops import moe_finalize_fuse_shared
from tests.ops.finalize_cases import BF16, DEVICES, F32, make

field_report = pytest.mark.field_report


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def bad_inputs(device):
    """name -> (inputs, kind, text)"""
    good = make(4, 8, 32, padded=40, device=device)
    logits = torch.zeros(4, device=device)

    def change(**kwargs):
        return replace(good, **kwargs)

    return {
        "gemm2 fp64": (change(gemm2_out=good.gemm2_out.double()), TypeError, "gemm2_out: expected"),
        "gemm2 1-D": (
            change(gemm2_out=good.gemm2_out.view(-1)),
            ValueError,
            "gemm2_out: expected 2",
        ),
        "gemm2 columns": (
            change(gemm2_out=strided(good.gemm2_out)),
            ValueError,
            "gemm2_out: expected adjacent columns",
        ),
        "gemm2 narrow": (
            change(gemm2_out=good.gemm2_out[:, :31]),
            ValueError,
            "shared_output: expected a width of 1 to 31",
        ),
        "idx int64": (change(idx=good.idx.long()), TypeError, "permuted_idx: expected int32"),
        "idx short": (change(idx=good.idx.view(-1)[:-1]), ValueError, "permuted_idx: expected"),
        "idx transposed": (change(idx=good.idx.t()), ValueError, "permuted_idx: expected"),
        "idx 3-D": (change(idx=good.idx[None]), ValueError, "permuted_idx: expected"),
        "idx strided": (
            change(idx=strided(good.idx)),
            ValueError,
            "permuted_idx: expected a contiguous",
        ),
        "weights fp64": (change(weights=good.weights.double()), TypeError, "expert_weights: exp"),
        "weights int": (change(weights=good.weights.int()), TypeError, "expert_weights: expected"),
        "weights flat": (change(weights=good.weights.view(-1)), ValueError, "expert_weights: exp"),
        "weights strided": (
            change(weights=strided(good.weights)),
            ValueError,
            "expert_weights: expected a contiguous",
        ),
        "top_k 0": (change(top_k=0), ValueError, "top_k: expected 1 to 64, got 0"),
        "top_k 65": (change(top_k=65), ValueError, "top_k: expected 1 to 64, got 65"),
        "top_k -1": (change(top_k=-1), ValueError, "top_k: expected 1 to 64, got -1"),
        "top_k 7": (change(top_k=7), ValueError, "expert_weights: expected .*top_k=7"),
        "shared f32": (change(shared=good.shared.float()), TypeError, "shared_output: expected bf"),
        "shared rows": (change(shared=good.shared[:3]), ValueError, "shared_output: expected"),
        "shared empty": (
            change(shared=good.shared.new_empty(0, 32)),
            ValueError,
            "shared_output: expected .*pass None for no shared",
        ),
        "shared 1-D": (change(shared=good.shared[0]), ValueError, "shared_output: expected 2"),
        "shared columns": (
            change(shared=strided(good.shared)),
            ValueError,
            "shared_output: expected adjacent columns",
        ),
        "no weights, top_k 0": (
            change(weights=None, top_k=0),
            ValueError,
            "top_k: expected 1 to 64",
        ),
        "no weights, flat idx, top_k 0": (
            change(weights=None, idx=good.idx.view(-1), top_k=0),
            ValueError,
            "top_k: expected 1 to 64",
        ),
        "no weights, flat idx, top_k -1": (
            change(weights=None, idx=good.idx.view(-1), top_k=-1),
            ValueError,
            "top_k: expected 1 to 64",
        ),
        "no weights, top_k 7": (
            change(weights=None, top_k=7),
            ValueError,
            "permuted_idx: expected .num_tokens=4, top_k=7",
        ),
        "no weights, flat idx, top_k 7": (
            change(weights=None, idx=good.idx.view(-1), top_k=7),
            ValueError,
            "permuted_idx: expected .num_tokens=4, top_k=7",
        ),
        "gate without shared": (
            change(shared=None, gate=logits, hidden_dim=32),
            ValueError,
            "shared_gate_logits: expected a shared_output",
        ),
        "gate fp16": (
            change(gate=logits.half()),
            TypeError,
            "shared_gate_logits: expected bfloat16 like gemm2_out, got float16",
        ),
        "gate int": (change(gate=logits.int()), TypeError, "shared_gate_logits: expected bf"),
        "gate short": (
            change(gate=logits[:3]),
            ValueError,
            "shared_gate_logits: expected .num_tok",
        ),
        "gate wide": (
            change(gate=logits[:, None].repeat(1, 2)),
            ValueError,
            r"shared_gate_logits: expected .num_tokens=4. or .4, 1., got .4, 2.",
        ),
        "gate transposed": (change(gate=logits[None]), ValueError, "shared_gate_logits: expected"),
        "gate strided": (
            change(gate=strided(logits)),
            ValueError,
            "shared_gate_logits: expected a contiguous",
        ),
        "hidden_dim with shared": (change(hidden_dim=31), ValueError, "hidden_dim: expected 32"),
        "hidden_dim 0": (
            change(shared=None, hidden_dim=0),
            ValueError,
            "hidden_dim: expected 1 to 40, the width of gemm2_out, got 0",
        ),
        "hidden_dim 41": (change(shared=None, hidden_dim=41), ValueError, "hidden_dim: expected"),
    }


@field_report("M3")
@field_report("M9")
@field_report("M12")
@field_report("M13")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", bad_inputs("cpu"))
def test_bad_input(device, name):
    inputs, kind, text = bad_inputs(device)[name]
    with pytest.raises(kind, match=text):
        inputs.run()
    width = 32 if inputs.shared is None else inputs.shared.shape[-1]
    out = torch.full((4, width), 7.0, dtype=BF16, device=device)
    with pytest.raises(kind, match=text.split(":")[0]):
        inputs.run(out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_out(device):
    good = make(4, 8, 32, device=device)
    with pytest.raises(TypeError, match="out: expected bfloat16"):
        good.run(out=torch.empty(4, 32, device=device))
    with pytest.raises(ValueError, match=r"out: expected \[4, 32\]"):
        good.run(out=torch.empty(3, 32, dtype=BF16, device=device))
    with pytest.raises(ValueError, match="out: expected width 32"):
        good.run(out=torch.empty(4, 33, dtype=BF16, device=device))
    with pytest.raises(ValueError, match="out: expected 2 dimensions"):
        good.run(out=torch.empty(128, dtype=BF16, device=device))
    with pytest.raises(ValueError, match="out: expected rows that do not overlap"):
        good.run(out=torch.empty(1, 32, dtype=BF16, device=device).expand(4, 32))
    with pytest.raises(ValueError, match="out: shares memory with gemm2_out"):
        good.run(out=good.gemm2_out[:4])
    small = make(4, 8, 8, device=device, dtype=F32)
    with pytest.raises(ValueError, match="out: shares memory with expert_weights"):
        small.run(out=small.weights)
    gate = torch.zeros(4, device=device)
    with pytest.raises(ValueError, match="out: shares memory with shared_gate_logits"):
        replace(make(4, 8, 1, device=device, dtype=F32), gate=gate).run(out=gate[:, None])
    as_float = small.idx.view(F32)
    with pytest.raises(ValueError, match="out: shares memory with expanded_idx_to_permuted_idx"):
        small.run(out=as_float)
    storage = torch.zeros(5, 32, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="out: shares part of its memory with shared_output"):
        replace(good, shared=storage[:4]).run(out=storage[1:])


@field_report("M13")
def test_index_beyond_the_rows_is_an_error_on_cpu():
    good = make(4, 8, 32)
    idx = good.idx.clone()
    idx[2, 5] = good.gemm2_out.shape[0]
    out = torch.full((4, 32), 7.0, dtype=BF16)
    with pytest.raises(ValueError, match=r"indices below 35 .*got 35 for token 2, k 5"):
        replace(good, idx=idx).run(out=out)
    assert (out == 7).all()


@pytest.mark.gpu
@field_report("M13")
def test_index_beyond_the_rows_is_an_error_on_cuda_when_checked(monkeypatch):
    good = make(4, 8, 32, device="cuda")
    monkeypatch.setenv("SGL_MOE_JIT_CHECK_INDICES", "1")
    good.run()
    idx = good.idx.clone()
    idx[2, 5] = good.gemm2_out.shape[0]
    with pytest.raises(ValueError, match=r"indices below 35 .*got 35 at flat position 21"):
        replace(good, idx=idx).run()


@pytest.mark.gpu
@field_report("J37")
@pytest.mark.parametrize("which", ["idx", "weights", "shared", "gate"])
def test_a_tensor_left_on_the_cpu_is_named(which):
    good = make(4, 8, 32, device="cuda", gate=F32)
    name = {
        "idx": "permuted_idx",
        "weights": "expert_weights",
        "shared": "shared_output",
        "gate": "shared_gate_logits",
    }[which]
    with pytest.raises(ValueError, match=f"{name}: expected device cuda:0 .*got cpu"):
        replace(good, **{which: getattr(good, which).cpu()}).run()
    good.run()  # the context is still usable


def test_other_devices_are_refused():
    x = torch.empty(2, 8, dtype=F32, device="meta")
    with pytest.raises(ValueError, match="expanded_idx_to_permuted_idx: expected device meta"):
        moe_finalize_fuse_shared(
            x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), None, 1, out=torch.ones(2, 8)
        )


def test_cpu_isa_is_checked(monkeypatch):
    monkeypatch.setenv("SGL_MOE_JIT_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="SGL_MOE_JIT_CPU_ISA: expected one of"):
        make(4, 8, 32).run()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gemm2_out": None}, "gemm2_out: expected a Tensor, got NoneType"),
        ({"idx": [0]}, "expanded_idx_to_permuted_idx: expected a Tensor, got list"),
        ({"weights": 1.0}, "expert_weights: expected a Tensor or None, got float"),
        ({"gate": 0.5}, "shared_gate_logits: expected a Tensor or None, got float"),
        ({"shared": 0}, "shared_output: expected a Tensor or None, got int"),
        ({"top_k": True}, "top_k: expected an int, got bool"),
        ({"top_k": 8.0}, "top_k: expected an int, got float"),
        ({"top_k": torch.tensor(8)}, "top_k: expected an int, got Tensor"),
        ({"factor": torch.tensor(2.5)}, "routed_scaling_factor: expected a float, got Tensor"),
        ({"factor": None}, "routed_scaling_factor: expected a float, got NoneType"),
        ({"hidden_dim": 32.0}, "hidden_dim: expected an int or None, got float"),
    ],
)
def test_an_argument_of_another_kind(change, text):
    with pytest.raises(TypeError, match=text):
        replace(make(4, 8, 32), **change).run()
    with pytest.raises(TypeError, match="enable_pdl: expected True, False or None, got str"):
        make(4, 8, 32).run(enable_pdl="no")
    with pytest.raises(TypeError, match="out: expected a Tensor or None, got list"):
        make(4, 8, 32).run(out=[0])


def test_a_width_beyond_the_grid_is_refused():
    wide = torch.empty(1, 2**23 + 8, dtype=BF16)
    with pytest.raises(ValueError, match="hidden_dim: expected a width of at most 8388608"):
        moe_finalize_fuse_shared(
            wide, torch.full((1, 1), -1, dtype=torch.int32), torch.ones(1, 1), None, 1
        )
