# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``fuse_shared_experts``: what it touches, what it leaves, and that it can be undone."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sgl_moe_jit.integrations import transformers as integration
from sgl_moe_jit.integrations.transformers.block_table import SUPPORTED

from .tiny_models import (
    BLOCK_ROUNDINGS,
    HIDDEN,
    SHARED_FAMILIES,
    assert_close,
    build,
    last_block,
    tokens,
)

OURS = integration.EXPERTS_IMPLEMENTATION
fuse, unfuse = integration.fuse_shared_experts, integration.unfuse_shared_experts


@pytest.mark.parametrize("family", SHARED_FAMILIES)
@torch.no_grad()
def test_the_fused_kernel_runs_and_unfuse_restores_everything(family, deferred):
    model, ids = build(family, implementation="batched_mm"), tokens()
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    state = model.state_dict()
    report = fuse(model)
    assert fuse(model) == integration.FusionReport(
        (), tuple((n, "already fused") for n in report.fused)
    )
    model(ids)
    assert deferred == [True] * len(report.fused)
    fused_state = model.state_dict()
    assert list(fused_state) == list(state)
    assert all(fused_state[k].data_ptr() == state[k].data_ptr() for k in state)
    for name in report.fused:
        assert isinstance(model.get_submodule(name), before[name][0])
    model.get_submodule(report.fused[0]).dual_stream = False
    assert unfuse(model) == report.fused
    assert unfuse(model) == ()
    assert model.config._experts_implementation == "batched_mm"
    for name, m in model.named_modules():
        assert (type(m), dict(m.__dict__)) == before[name], name


@torch.no_grad()
def test_another_implementation_chosen_later_is_respected(deferred):
    model, ids = build("qwen2_moe"), tokens()
    stock = model(ids).logits
    fuse(model)
    model.set_experts_implementation("eager")
    assert torch.equal(model(ids).logits, stock)
    assert deferred == [False, False]
    model.set_experts_implementation("batched_mm")
    unfuse(model)
    assert model.config._experts_implementation == "batched_mm"


@torch.no_grad()
def test_the_switch_turns_deferral_off(deferred, monkeypatch):
    block, x = last_block("glm4_moe"), torch.randn(2, 3, HIDDEN)
    fuse(block)
    on = block(x)
    monkeypatch.setenv("SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE", "0")
    assert_close(block(x), on, BLOCK_ROUNDINGS, "switched off")
    assert deferred == [True, False]


def test_what_is_left_alone_has_a_reason(monkeypatch):
    reasons = {}

    def left(case, model):
        report = fuse(model)
        assert report.fused == ()
        reasons[case] = report.skipped[-1][1]

    left("no shared", build("mixtral"))
    block = last_block("deepseek_v3")
    block.__class__ = type("DeepseekV3MoE", (type(block),), {})
    left("subclass", block)
    block = last_block("deepseek_v3")
    block.forward = block.forward
    left("instance", block)
    block = last_block("deepseek_v3")
    block.experts.forward = block.experts.forward  # as expert parallelism does
    left("expert parallel", block)
    block = last_block("deepseek_v3")
    block.experts.down_proj.data = block.experts.down_proj.data.to(torch.float8_e4m3fn)
    left("quantized", block)
    block = last_block("deepseek_v3")
    block.experts.config._experts_implementation = "deepgemm_megamoe"
    left("megamoe", block)
    block = last_block("qwen2_moe")
    block.shared_expert_gate = None
    left("no gate", block)
    block = last_block("deepseek_v3")
    stock = type(block).forward
    monkeypatch.setattr(type(block), "forward", lambda self, x: self.norm(stock(self, x)))
    left("other forward", block)
    assert "no shared expert" in reasons["no shared"]
    assert "not a block known here" in reasons["subclass"]
    assert "forward is patched on this instance" in reasons["instance"]
    assert "Experts.forward is patched" in reasons["expert parallel"]
    assert "DeepseekV3Experts.down_proj: expected bfloat16" in reasons["quantized"]
    assert "deepgemm_megamoe" in reasons["megamoe"]
    assert "shared_expert_gate: expected a module, got None" in reasons["no gate"]
    assert "not the one known here" in reasons["other forward"]


def test_every_listed_class_of_the_installed_version_has_the_known_forward():
    folder = Path(find_spec("transformers").origin).parent / "models"
    texts = {}
    for name, (model, style) in SUPPORTED.items():
        path = folder / model / f"modeling_{model}.py"
        if not path.exists():
            continue  # of another version
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.ClassDef) and node.name == name):
                continue
            method = next(x for x in node.body if getattr(x, "name", None) == "forward")
            method.returns = None
            for argument in method.args.args:
                argument.annotation = None
            texts.setdefault(style.children, {})[name] = ast.unparse(method)
    assert sum(map(len, texts.values())) >= 20
    for members in texts.values():
        # those run in these tests stand for the rest: same text
        tested = {"DeepseekV3MoE", "Qwen2MoeSparseMoeBlock"} & set(members)
        expected = members[tested.pop()]
        assert [n for n, text in members.items() if text != expected] == []


@pytest.mark.parametrize("family", SHARED_FAMILIES)
@torch.no_grad()
def test_a_deep_copy_computes_with_its_own_weights(family):
    block, x = last_block(family), torch.randn(1, 5, HIDDEN)
    fuse(block)
    out, twin = block(x), copy.deepcopy(block)
    for parameter in block.parameters():
        parameter.zero_()
    assert torch.equal(twin(x), out)
    assert unfuse(twin) == ("",)
    assert twin.experts.config._experts_implementation == "eager"
    assert block.experts.config._experts_implementation == OURS


@torch.no_grad()
def test_pickle_in_this_process_and_into_a_fresh_one(tmp_path):
    block, x = last_block("deepseek_v3"), torch.randn(1, 5, HIDDEN)
    fuse(block)
    out = block(x)
    assert torch.equal(pickle.loads(pickle.dumps(block))(x), out)
    path = tmp_path / "block.pkl"
    path.write_bytes(pickle.dumps((block, x, out)))
    code = (
        "import pickle, pathlib, torch\n"
        f"block, x, out = pickle.loads(pathlib.Path({str(path)!r}).read_bytes())\n"
        "assert type(block).__name__ == 'FusedDeepseekV3MoE', type(block)\n"
        "assert block.experts.config._experts_implementation == 'sgl_moe_jit'\n"
        "assert (block(x) - out).abs().max() <= 1e-5 * out.abs().max()\n"
        "from sgl_moe_jit.integrations.transformers import unfuse_shared_experts\n"
        "assert unfuse_shared_experts(block) == ('',)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
