# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what goes where, exit statuses, the doctor and building ahead."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

import sgl_moe_jit
from sgl_moe_jit import cli
from sgl_moe_jit.bench import ahead, doctor
from sgl_moe_jit.errors import BuildError
from sgl_moe_jit.jit import CudaArch

NO_TOOLS = {"PATH": "/nonexistent", "CXX": "", "CUDA_HOME": "", "CUDA_PATH": ""}


def run(*arguments, **variables):
    """Run the command line in a child; variables are set on top of this process's."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-m", "sgl_moe_jit", *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--seeds", "one"]])
def test_wrong_usage_exits_with_2_and_prints_nothing_on_stdout(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""


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


def test_a_gpu_asked_for_and_absent_is_one_line(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --device: expected a CUDA device or driver"), (
        captured.err
    )


def test_doctor_json_and_text_hold_the_same_facts_and_no_secrets(tmp_path):
    variables = {
        "SGL_MOE_JIT_CACHE_DIR": str(tmp_path / "cache"),
        "SGL_MOE_JIT_PDL": "perhaps",
        "SGL_MOE_JIT_CASHE_DIR": "typo",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }
    done = run("doctor", "--json", **variables)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    for name in ("system", "cpu", "torch", "gpu", "host_compiler", "nvcc", "cutlass", "packages"):
        assert report[name], name
    assert report["torch"]["version"] == torch.__version__
    assert report["cache"] == {
        "path": str(tmp_path / "cache"),
        "exists": False,
        "writable": True,
        "entries": 0,
        "bytes": 0,
    }
    assert not (tmp_path / "cache").exists()
    assert "SGL_MOE_JIT_PDL: expected one of 1/0" in report["environment"]["SGL_MOE_JIT_PDL"]
    assert "not a variable of this library" in report["environment"]["SGL_MOE_JIT_CASHE_DIR"]
    text = run("doctor", **variables)
    assert text.returncode == done.returncode
    assert text.stderr == "" and done.stderr == ""
    for output in (done.stdout, text.stdout):
        assert "hunter2" not in output
    for facts in (report["torch"], report["cache"], report["packages"]):
        assert all(str(value) in text.stdout for value in facts.values() if value is not None)
    assert all(feature["why"] in text.stdout for feature in report["features"])


def test_doctor_without_a_compiler_says_what_to_install_and_counts_the_cache(tmp_path):
    variables = {"SGL_MOE_JIT_CACHE_DIR": str(tmp_path), **NO_TOOLS}
    cold = run("doctor", "--json", **variables)
    assert cold.returncode == 1, cold.stderr
    cpu = json.loads(cold.stdout)["features"][0]
    assert (cpu["name"], cpu["ok"], cpu["mend"]) == ("CPU kernels", False, "apt-get install g++")
    assert "no C++ compiler found" in cpu["why"]
    built = run("compile", "--cpu", SGL_MOE_JIT_CACHE_DIR=str(tmp_path))
    assert built.returncode == 0, built.stderr
    warm = json.loads(run("doctor", "--json", **variables).stdout)
    assert warm["features"][0]["ok"], warm["features"][0]
    assert "in the cache" in warm["features"][0]["why"]
    assert warm["cache"]["entries"] == len(ahead.specs_for(None))


def test_doctor_sees_a_compiler_that_cannot_build(tmp_path, monkeypatch):
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\necho 'tiny.cc:1: fatal error: cstdlib: No such file' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path / "cache"))
    report = doctor.examine()
    assert not report.ok
    assert "cstdlib: No such file" in report.features[0].why
    assert report.features[0].mend == "apt-get install g++"


def test_doctor_with_a_wrong_cuda_home(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    report = doctor.examine()
    cuda = report.features[1]
    assert not cuda.ok and "expected bin/nvcc" in cuda.why
    assert cuda.mend == "unset CUDA_HOME CUDA_PATH"
    assert str(tmp_path) in report.to_json()["environment"]["CUDA_HOME"]


GPU = {"devices": [{"name": "A GPU", "capability": "10.0"}], "target": "sm_100a", "driver": "580.1"}


@pytest.mark.parametrize(
    ("gpu", "nvcc", "ok", "why"),
    [
        (GPU, {"targets": ["sm_90", "sm_100"], "version": "13.0"}, True, "can be built"),
        (GPU, {"targets": ["sm_90"], "version": "12.4"}, False, "12.4 does not know sm_100a"),
        (GPU, {"error": "no CUDA compiler (nvcc) found. Searched:\n  PATH"}, False, "no CUDA comp"),
        (GPU | {"target": None, "target_error": "odd"}, {"targets": []}, False, "odd"),
    ],
)
def test_doctor_on_a_gpu_machine_requires_the_cuda_kernels(
    gpu, nvcc, ok, why, monkeypatch, tmp_path
):
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(doctor._PROBES, "gpu", lambda: gpu)
    monkeypatch.setitem(doctor._PROBES, "nvcc", lambda: nvcc)
    monkeypatch.setitem(doctor._PROBES, "host_compiler", lambda: {"path": "g++"})
    report = doctor.examine()
    cuda = report.features[1]
    assert cuda.required and cuda.ok is ok and report.ok is ok
    assert why in cuda.why
    assert ok or cuda.mend
    assert cuda.why in doctor.render(report)


@pytest.mark.parametrize("name", list(doctor._PROBES), ids="{}_probe".format)
def test_doctor_survives_any_failing_probe(name, monkeypatch):
    def fail():
        raise RuntimeError("probe broke")

    for other in doctor._PROBES:
        monkeypatch.setitem(doctor._PROBES, other, dict)
    monkeypatch.setitem(doctor._PROBES, name, fail)
    report = doctor.examine()
    assert report.facts[name] == {"error": "probe broke"}
    assert "probe broke" in doctor.render(report)
    json.dumps(report.to_json())
