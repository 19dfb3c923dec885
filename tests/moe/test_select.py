# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Which runner serves a layer, by quantization, architecture and what is installed, and why."""

import importlib
import logging
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runner_config import RunnerConfig
from sgl_moe_jit.moe.runners import (
    base,
    create_runner,
    explain,
    flashinfer_functions,
    select_runner,
)
from sgl_moe_jit.moe.topk import TopKFormat
from tests.moe.flashinfer_cases import FORMATS, make_layer
from tests.moe.flashinfer_fake import FakeFlashInfer
from tests.moe.runner_cases import make_weights

field_report = pytest.mark.field_report
CUDA = RunnerConfig(
    128, 7168, 2048, torch.bfloat16, torch.device("cuda", 0), False, True, layout="any"
)
NONE, FP8, FP8_TENSOR, FP8_CHANNEL, NVFP4, MXFP4 = (
    Quantization.NONE,
    Quantization.FP8_BLOCK,
    Quantization.FP8_PER_TENSOR,
    Quantization.FP8_PER_CHANNEL,
    Quantization.NVFP4,
    Quantization.MXFP4,
)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that pretends a GPU, and installed packages."""
    fake = FakeFlashInfer("0.7.4")
    real = importlib.import_module

    def pretend(capability=None, **packages):
        packages = {name.replace("_", "-"): version for name, version in packages.items()}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(
            flashinfer_functions, "installed_version",
            lambda package="flashinfer-python": packages.get(package),
        )  # fmt: skip
        monkeypatch.setattr(
            "sgl_moe_jit.moe.runners.flashinfer_trtllm.installed_version",
            lambda: packages.get("flashinfer-python"),
        )
        monkeypatch.setattr(flashinfer_functions, "_found", None)

        class Module:
            __version__ = packages.get("flashinfer-python")

        for name, function in fake.functions().table.items():
            setattr(Module, name, staticmethod(function))

        def load(name, *rest):
            return Module if name.startswith("flashinfer") else real(name, *rest)

        monkeypatch.setattr(flashinfer_functions.importlib, "import_module", load)

    return pretend


CHOICES = [
    # capability, quantization, chosen
    ((10, 0), NONE, "flashinfer_trtllm"),
    ((10, 3), NVFP4, "flashinfer_trtllm"),
    ((10, 0), MXFP4, "flashinfer_trtllm"),
    ((10, 0), FP8, "flashinfer_trtllm"),
    ((10, 0), FP8_TENSOR, "flashinfer_cutlass"),
    ((12, 0), NVFP4, "flashinfer_cutlass"),
    ((9, 0), NONE, "flashinfer_cutlass"),
    ((9, 0), FP8, "flashinfer_cutlass"),
    ((9, 0), FP8_CHANNEL, "grouped_mm"),
    ((10, 0), FP8_CHANNEL, "native"),
    ((9, 0), NVFP4, None),
    ((9, 0), MXFP4, None),
    ((8, 0), NONE, "grouped_mm"),
    ((7, 5), NONE, "native"),
]


@pytest.mark.parametrize(("capability", "quantization", "chosen"), CHOICES)
@field_report("U11")
def test_auto_picks_by_quantization_and_architecture(machine, capability, quantization, chosen):
    machine(capability, flashinfer_python="0.7.4")
    config = replace(CUDA, quantization=quantization)
    plan = explain(config)
    assert plan.runner == chosen
    names = {"flashinfer_trtllm", "flashinfer_cutlass", "grouped_mm", "native"}
    assert {name for name, _ in plan.refused} | set(plan.also) | {chosen} - {None} == names
    assert all(why for _, why in plan.refused)
    if chosen is None:
        with pytest.raises(UnsupportedError, match="no runner serves this layer: flashinfer_trtl"):
            select_runner("auto", config)
        assert plan.reason.startswith("none of ") and not plan.can_defer
    else:
        assert select_runner("auto", config).entry.name == chosen
        assert plan.can_defer == (chosen != "flashinfer_cutlass")
        assert ("flashinfer 0.7.4" in plan.reason) == chosen.startswith("flashinfer")


def test_auto_picks_by_what_is_installed(machine):
    machine((10, 0))
    plan = explain(CUDA)
    assert plan.runner == "grouped_mm"
    why = dict(plan.refused)["flashinfer_trtllm"]
    assert why == "flashinfer is not installed; pip install flashinfer-python"
    machine((10, 0), flashinfer_python="0.6.14")
    why = dict(explain(CUDA).refused)["flashinfer_trtllm"]
    assert why.startswith("flashinfer 0.6.14: needs 0.6.15 or newer")


@field_report("U1")
@pytest.mark.parametrize("companion", ["flashinfer_cubin", "flashinfer_jit_cache"])
def test_a_stale_pack_is_named_and_never_loaded(machine, companion, monkeypatch):
    machine((10, 0), flashinfer_python="0.7.4", **{companion: "0.7.2+cu130"})
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")  # no switch loads it
    monkeypatch.setattr(flashinfer_functions.importlib, "import_module", pytest.fail)
    plan = explain(CUDA)
    assert plan.runner == "grouped_mm"
    package = companion.replace("_", "-")
    why = dict(plan.refused)["flashinfer_trtllm"]
    assert why.startswith(f"{package} 0.7.2+cu130 is installed beside flashinfer-python 0.7.4")
    assert f"pip install '{package}==0.7.4'" in why and "\n" not in why
    with pytest.raises(UnsupportedError, match=r"0\.7\.2\+cu130 is installed beside"):
        select_runner("flashinfer_trtllm", CUDA)


@field_report("U1")
def test_a_local_label_is_no_mismatch(machine):
    machine((10, 0), flashinfer_python="0.7.4", flashinfer_jit_cache="0.7.4+cu130")
    assert explain(CUDA).runner == "flashinfer_trtllm"


@field_report("U1")
def test_an_import_that_fails_is_a_reason_not_a_crash(machine, monkeypatch):
    machine((10, 0), flashinfer_python="0.7.4")

    def broken(name):
        raise RuntimeError("flashinfer-cubin version (0.6.0) does not match")

    monkeypatch.setattr(flashinfer_functions.importlib, "import_module", broken)
    plan = explain(CUDA)
    assert plan.runner == "grouped_mm"
    why = dict(plan.refused)["flashinfer_trtllm"]
    assert why.startswith("flashinfer 0.7.4: import flashinfer fails: RuntimeError: flashinfer-cu")


def test_a_checkout_that_shadows_the_wheel_is_judged_by_its_own_version(machine, monkeypatch):
    machine((10, 0), flashinfer_python="0.7.4")
    load = flashinfer_functions.importlib.import_module
    load("flashinfer").__version__ = "0.6.14"
    assert dict(explain(CUDA).refused)["flashinfer_trtllm"].startswith("flashinfer 0.6.14: needs")


@field_report("U11")
@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("flashinfer_trtllm", replace(CUDA, device=torch.device("cpu")), "10.0, 10.3, got cpu"),
        ("flashinfer_trtllm", replace(CUDA, dtype=torch.float32), "dtype: needs bfloat16"),
        ("flashinfer_trtllm", replace(CUDA, quantization=FP8_TENSOR),
         "quantization: serves none, fp8_block, nvfp4, mxfp4, got fp8_per_tensor"),
        ("flashinfer_trtllm", replace(CUDA, quantization=FP8, num_experts=6),
         "num_experts: needs a multiple of 4, got 6"),
        ("flashinfer_trtllm", replace(CUDA, layout="plain"),
         "weights: needs layout flashinfer_trtllm, got plain; prepare them for it"),
        ("flashinfer_cutlass", replace(CUDA, quantization=MXFP4), "got mxfp4"),
        ("flashinfer_cutlass", replace(CUDA, quantization=FP8), "capability 9.0, got 10.0"),
        ("native", replace(CUDA, quantization=NVFP4),
         "quantization: serves none, fp8_per_channel, got nvfp4"),
        ("grouped_mm", replace(CUDA, layout="flashinfer_trtllm"), "needs layout plain, got"),
    ],
)  # fmt: skip
def test_a_runner_asked_for_by_name_serves_or_fails(machine, name, config, why):
    machine((10, 0), flashinfer_python="0.7.4")
    with pytest.raises(UnsupportedError, match=f"^runner {name!r} cannot serve .*{why}"):
        select_runner(name, config)
    plan = explain(config, name)
    assert plan.runner is None and why in plan.reason and plan.asked == name
    assert str(plan).startswith(f"no runner (asked for: {name})\n")


@pytest.mark.parametrize("quantization", FORMATS, ids=str)
def test_prepared_weights_find_their_runner(machine, quantization):
    weights = make_layer(quantization).weights
    with pytest.raises(UnsupportedError, match=r"no runner serves .*trtllm: device"):
        create_runner("auto", weights)  # on a CPU
    machine((10, 0), flashinfer_python="0.7.4")
    config = replace(weights.runner_config(), device=torch.device("cuda", 0))
    selection = select_runner("auto", config)
    assert selection.entry.name == "flashinfer_trtllm" and selection.refused == ()
    runner = selection.entry.create(weights, functions=FakeFlashInfer("0.7.4").functions())
    for topk_format in TopKFormat:
        plan = explain(config, topk_format=topk_format)
        assert plan.can_defer == runner.can_defer(topk_format)


@pytest.mark.parametrize("name", ["native", "grouped_mm"])
def test_the_plan_agrees_with_the_runner_on_deferral(name):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weights = make_weights(dtype=dtype)
        plan = explain(weights, name)
        if plan.runner is None:
            continue
        for topk_format in TopKFormat:
            can = create_runner(name, weights).can_defer(topk_format)
            assert explain(weights, name, topk_format).can_defer == can
    if name == "native":
        assert "float64" in explain(make_weights(dtype=torch.float64), name).deferral


@field_report("U11")
def test_the_plan_reads_like_a_plan(machine):
    machine((10, 0), flashinfer_python="0.6.15")
    plan = explain(CUDA, topk_format=TopKFormat.BYPASSED)
    assert str(plan).splitlines() == [
        "flashinfer_trtllm (asked for: auto)",
        "  layer     128 experts, hidden 7168, width 2048, bfloat16, layout any, on cuda:0",
        "  because   first of flashinfer_trtllm, flashinfer_cutlass, grouped_mm, native that can "
        "serve it: flashinfer 0.6.15",
        "  deferral  no, topk format bypassed: flashinfer 0.6.15 may label its bfloat16 routing "
        "weights float32 for quantization none (flashinfer#3925); pip install -U "
        "'flashinfer-python>=0.6.16'",
        "  also able flashinfer_cutlass, grouped_mm, native",
    ]
    with pytest.raises(FrozenInstanceError):
        plan.runner = "native"
    with pytest.raises(ValueError, match=r"runner: expected one of auto, .*, got 'cutlass'"):
        explain(CUDA, "cutlass")


@field_report("U11")
def test_auto_says_once_what_it_chose(caplog, capsys, monkeypatch):
    monkeypatch.setattr(base, "_logged", set())
    with caplog.at_level(logging.INFO, "sgl_moe_jit.moe"):
        for _ in range(3):
            create_runner("auto", make_weights())
        create_runner("auto", make_weights(hidden=30, width=15))
        create_runner("native", make_weights())  # asked for: nothing to tell
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == (
        "runner auto: grouped_mm for 6 experts, hidden 32, width 16, float32, layout plain, on cpu"
    )
    assert lines[1].startswith("runner auto: native for 6 experts, hidden 30")
    assert "; grouped_mm refused: strides: " in lines[1]
    assert len(lines) == 2 and all(r.levelno == logging.INFO for r in caplog.records)
    assert capsys.readouterr().out == ""


def test_nothing_of_flashinfer_is_imported_by_importing_the_runners():
    import subprocess
    import sys

    code = (
        "import sys, torch, sgl_moe_jit.moe.runners as r;"
        "from sgl_moe_jit.moe.runner_config import RunnerConfig as C;"
        "r.explain(C(8, 128, 128, torch.bfloat16, torch.device('cpu'), False, True, layout='any'));"
        "print([m for m in sys.modules if m.split('.')[0] == 'flashinfer'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
