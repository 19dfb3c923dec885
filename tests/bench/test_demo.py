# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo: it runs end to end, it is right when it says so, and it says so when it is wrong."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from sgl_moe_jit import cli
from sgl_moe_jit.bench import demo, demo_finalize, demo_jit, demo_layer, demo_model, demo_report
from sgl_moe_jit.bench.demo_finalize import FinalizeResult
from sgl_moe_jit.bench.demo_jit import JitResult
from sgl_moe_jit.bench.demo_layer import ErrorSize, LayerErrors
from sgl_moe_jit.bench.demo_model import SeedResult

CPU = torch.device("cpu")


def a_result(**changes):
    seed = SeedResult(1, 128, 128, 3e-6, 1.6, 1e-3, 6.0)
    case = FinalizeResult(64, 10.0, 9.0, 11.0, 30.0, 29.0, 31.0, 9179136, 11014144, True, "cold")
    layer = LayerErrors("mlp", 3.0, ErrorSize(0.02, 0.05, 0.09), ErrorSize(0.01, 0.04, 0.1))
    base = demo.DemoResult(
        "cpu: test", "grouped_mm", (seed,), (layer,), (case,), JitResult(1.5, 20.0)
    )
    return dataclasses.replace(base, **changes)


def test_demo_end_to_end_prints_one_json_object():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "sgl_moe_jit", "demo", "--json", "--device", "cpu", "--seeds", "7"],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["tokens_agree"] is True
    assert result["max_logit_diff"] <= 1e-4
    seed = result["seeds"][0]
    assert seed["tokens_equal"] == seed["tokens"] == 128
    # The comparison has teeth: logits are spread, and a missing shared row would show.
    assert seed["logit_std"] > 0.5 and seed["dropped_shared_diff"] > 1e3 * 1e-4
    finalize = result["finalize"]
    assert finalize["fused_us"] > 0 and finalize["separate_us"] > 0 and finalize["within_tolerance"]
    # 64 tokens: 8 rows, shared and output of 7168 bfloat16, and 8 slots of index and weight.
    assert finalize["bytes"] == 64 * (10 * 7168 * 2 + 8 * 8) == 9179136
    jit = result["jit"]
    assert jit["error"] is None
    assert 0 < jit["warm_milliseconds"] / 1e3 < jit["cold_seconds"]
    assert result["versions"]["torch"] == torch.__version__
    assert len(result["bf16_layers"]) == 3
    assert result["bf16_no_larger"], result["bf16_layers"]
    assert "compiling the finalize kernel" in done.stderr


def test_float64_layer_equals_the_stock_block_in_float64():
    model = demo_model.build_model(11, CPU).double()
    model.set_experts_implementation("eager")
    seen = demo_layer._run_stock(model)
    assert len(seen) == 3
    for name, block in demo_model.moe_layers(model):
        record = seen[name]
        x = record.hidden_states.view(-1, 256)
        exact = demo_layer.layer_float64(block, x, record.topk_ids, record.topk_weights)
        error = (record.output.view(-1, 256) - exact).abs().max()
        # Sums of at most 256 products of size 1 to 10, in float64.
        assert error < 1e-11, f"{name}: {error}"


def test_bfloat16_layers_are_no_worse_than_stock():
    for seed in demo.DEFAULT_SEEDS:
        model = demo_model.build_model(seed, CPU).bfloat16()
        layers = demo_layer.compare_bfloat16(model)
        assert len(layers) == 3
        for layer in layers:
            assert layer.fused.rms <= layer.stock.rms, (seed, layer)
            assert layer.fused.p999 <= layer.stock.p999, (seed, layer)
            # An error of bfloat16's size, not that of a wrong layer.
            assert layer.fused.rms < 2**-6 * layer.output_rms, (seed, layer)


def test_a_fused_model_without_its_shared_rows_is_reported(monkeypatch):
    def wrongly_fuse(model):
        for _, block in demo_model.moe_layers(model):
            block.shared_experts.down_proj.weight.data.mul_(0)

    monkeypatch.setattr(demo_model, "fuse_shared_experts", wrongly_fuse)
    monkeypatch.setattr(demo_model, "unfuse_shared_experts", lambda model: None)
    seed = demo_model.compare_float32(demo_model.build_model(1, CPU), 1)
    assert seed.tokens_equal < seed.tokens
    assert seed.max_logit_diff == pytest.approx(seed.dropped_shared_diff, rel=1e-3)
    assert not a_result(seeds=(seed,)).ok


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"tokens_equal": 127}, False),
        ({"max_logit_diff": 2e-4}, False),
        ({"max_logit_diff": math.nan}, False),
    ],
)
def test_exit_status_follows_tokens_and_logits(change, ok, monkeypatch, capsys):
    good = a_result()
    bad = dataclasses.replace(good.seeds[0], **change)
    result = a_result(seeds=(good.seeds[0], bad, good.seeds[0]))
    monkeypatch.setattr(demo, "run_demo", lambda seeds, device: result)
    assert result.ok is ok
    assert cli.main(["demo", "--device", "cpu"]) == (0 if ok else 1)
    assert ("NOT EQUAL" in capsys.readouterr().out) is not ok


def test_a_finalize_outside_its_bound_fails_the_demo():
    wrong = dataclasses.replace(a_result().finalize[0], within_tolerance=False)
    result = a_result(finalize=(wrong,))
    assert not result.ok
    assert "WRONG" in demo_report.render(result)


def test_finalize_check_sees_a_wrong_kernel(monkeypatch):
    x = demo_finalize.make_finalize_inputs(demo_finalize._CASE, 2, 2, device="cpu")[1]
    assert demo_finalize._within_tolerance(x)
    right = demo_finalize.fused
    monkeypatch.setattr(demo_finalize, "fused", lambda x: right(x) * 1.01)
    assert not demo_finalize._within_tolerance(x)


def test_report_names_each_number_with_its_unit():
    text = demo_report.render(a_result())
    for part in (
        "128 of 128",
        "3.0e-06",
        "10.0 (9.0-11.0)",
        "3.0x",
        "9.18 MB",
        "1.50 s",
        "20.0 ms",
    ):
        assert part in text, part
    assert "scatter" not in text


def test_report_says_when_the_times_cannot_be_trusted():
    noisy = dataclasses.replace(a_result().finalize[0], separate_p80_us=90.0)
    assert "scatter by more than 2x" in demo_report.render(a_result(finalize=(noisy,)))


def test_without_a_compiler_the_first_call_is_not_measured_and_says_why(monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    result = demo_jit.time_first_calls("cpu")
    assert result.cold_seconds is None and result.warm_milliseconds is None
    assert "CXX: expected a C++ compiler on PATH" in result.error
    assert "doctor" in demo_report.render(a_result(jit=result))


def test_a_missing_package_is_one_line_with_the_command():
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "from sgl_moe_jit.cli import main\n"
        "sys.exit(main(['demo']))\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'sgl-moe-jit[transformers]'" in done.stderr


def test_the_prompt_is_the_texts_bytes():
    data = bytes(demo_model.prompts().flatten().tolist())
    assert demo_model.TEXT.encode().startswith(data) and len(data) == 4 * 96
