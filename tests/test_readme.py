# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The README says nothing that does not run: its code, its tables, its paths."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from sgl_moe_jit.bench import readme

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
RESULTS = Path("benchmarks/results")


def test_generated_parts_are_current(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert readme.render(TEXT, RESULTS) == TEXT, f"run: {readme.COMMAND}"
    written = (RESULTS / "README.md").read_text()
    assert readme.all_figures(RESULTS) == written, f"run: {readme.COMMAND}"


def _tiny_deepseek():
    settings = {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "initializer_range": 0.2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    }
    config = transformers.DeepseekV3Config(**settings)
    return transformers.DeepseekV3ForCausalLM(config).eval()


def test_the_examples_run_one_after_the_other(tmp_path, capsys):
    """What they take for granted: a model and its inputs, a block of it, a process group."""
    model = _tiny_deepseek()
    inputs = {"input_ids": torch.arange(2, 16).view(2, 7), "max_new_tokens": 2}
    scope = {"model": model, "inputs": inputs, "stock": model.model.layers[1].mlp}
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        scope["group"] = dist.group.WORLD
        outputs = []
        examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
        for number, example in enumerate(examples):
            exec(compile(example, f"README.md, example {number}", "exec"), scope)
            outputs.append(scope.get("y"))
    finally:
        dist.destroy_process_group()
    assert "layer" in capsys.readouterr().out
    of_model, of_runner, of_block, of_ranks = outputs
    x, stock = scope["x"], scope["stock"]
    assert of_model is None and not type(stock).__module__.startswith("sgl_moe_jit")
    assert of_runner.shape == of_block.shape == x.shape
    with torch.no_grad():
        torch.testing.assert_close(of_ranks, stock(x[None])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "benchmarks/results/README.md"]
)
def test_every_file_it_names_is_there(document):
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:sgl_moe_jit|csrc|include|tests|docs|benchmarks)/[\w./*]+)`", text)
    linked = re.findall(r"\]\(([\w./]+\.(?:md|png))\)", text)
    assert named or linked
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    missing += [name for name in linked if not ((ROOT / document).parent / name).is_file()]
    assert not missing


def test_result_files_name_no_path_of_a_machine():
    for path in (ROOT / RESULTS).glob("*.json"):
        assert not re.search(r"[\" =]/[a-z]", path.read_text()), path
