# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what goes where, exit statuses, building ahead."""

import logging
import os
import subprocess
import sys

import pytest
import torch

import sgl_moe_jit
from sgl_moe_jit import cli
from sgl_moe_jit.bench import ahead
from sgl_moe_jit.errors import BuildError
from sgl_moe_jit.jit import CudaArch


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["demo", "--help"], ["doctor", "-h"]]
)
def test_help_and_version_import_no_torch(arguments):
    code = (
        "import sys\n"
        "from sgl_moe_jit.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as stop:\n    assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'tvm_ffi', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sgl_moe_jit {sgl_moe_jit.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["demo", "--seeds", "one"], "--seeds: expected integers with commas between them"),
        (["bench", "ep", "--ranks", "2,x"], "--ranks: expected integers with commas between them"),
        (["bench", "cpu", "--cases", ","], "--cases: expected names with commas between them"),
    ],
)
def test_wrong_usage_exits_with_2_and_prints_nothing_on_stdout(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") <= 3


def test_results_on_stdout_progress_on_stderr_and_silence_when_warm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path))
    one = ahead.specs_for(None)[:1]
    monkeypatch.setattr(ahead, "specs_for", lambda target: one)
    handlers = list(logging.getLogger("sgl_moe_jit").handlers)
    assert cli.main(["compile", "--cpu"]) == 0
    cold = capsys.readouterr()
    assert cold.out.startswith(f"cpu: 1 of 1 modules ready in {tmp_path}"), cold.out
    assert cold.out.count("\n") == 1
    assert f"building {one[0].label}" in cold.err and f"built {one[0].label} in" in cold.err
    assert cli.main(["compile", "--cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert logging.getLogger("sgl_moe_jit").handlers == handlers
    assert not logging.getLogger("sgl_moe_jit").isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, True, False), ["cpu"]),
        (("9.0a", False, False), ["sm_90a"]),
        (("sm_100a,90a,9.0a", True, False), ["cpu", "sm_100a", "sm_90a"]),
        ((None, False, True), ["cpu", "sm_80", "sm_90a", "sm_100a", "sm_120f"]),
    ],
)
def test_compile_targets(arguments, expected):
    targets = ahead.choose_targets(*arguments)
    assert [target.name if target else "cpu" for target in targets] == expected


@pytest.mark.parametrize("variable", [None, "9.0a"])
def test_compile_without_arguments_takes_what_this_machine_can_run(variable, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGL_MOE_JIT_CUDA_ARCH", variable or "")
    expected = [None] if variable is None else [None, CudaArch.parse(variable)]
    assert ahead.choose_targets(None, False, False) == expected


def test_every_cuda_module_is_named_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    specs = ahead.specs_for(CudaArch.parse("10.0a"))
    assert specs and all(spec.arch == CudaArch.parse("10.0a") for spec in specs)
    labels = [spec.label for spec in specs]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("arch", "reason"), [("7.5", "expected 8.0 or newer"), ("9.9", "expected one of 8.0, 8.6, ")]
)
def test_a_target_that_does_not_exist_is_one_line_and_status_1(arch, reason, capsys):
    assert cli.main(["compile", "--arch", arch]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: CUDA target: {reason}")
    assert captured.err.count("\n") == 1


def test_a_failed_build_does_not_stop_the_rest_and_gives_status_1(monkeypatch, capsys):
    specs = ahead.specs_for(CudaArch.parse("9.0a"))[:2]

    def load(spec):
        if spec is specs[0]:
            raise BuildError("finalize.cu(1): error: no")

    monkeypatch.setattr(ahead, "specs_for", lambda target: specs)
    monkeypatch.setattr(ahead, "load_spec", load)
    assert cli.main(["compile", "--arch", "9.0a"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("sm_90a: 1 of 2 modules ready"), captured.out
    assert f"{specs[0].label}: finalize.cu(1): error: no" in captured.err


def test_a_missing_compiler_is_said_once_and_not_for_every_module(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    assert cli.main(["compile", "--arch", "9.0a"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("sm_90a: 0 of "), captured.out
    assert captured.err.startswith("sm_90a: CUDA_HOME='/nonexistent': expected bin/nvcc in it")
    # The extension for eager calls needs no nvcc, and is built all the same.
    assert [line for line in captured.err.splitlines()[1:] if "quick_call" not in line] == []


def test_a_gpu_asked_for_and_absent_is_one_line(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --device: expected a CUDA device or driver"), (
        captured.err
    )
