# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor: what it finds, what it says is missing, and how that is mended."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sgl_moe_jit.bench import ahead, doctor
from sgl_moe_jit.ops import quick_call

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


def named(report, name):
    (feature,) = (f for f in report.features if f.name == name)
    return feature


def test_json_and_text_hold_the_same_facts_and_no_secrets(tmp_path):
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


def test_without_a_compiler_says_what_to_install_and_counts_the_cache(tmp_path, monkeypatch):
    one = ahead.specs_for(None)[:1]
    monkeypatch.setattr(ahead, "specs_for", lambda target: one)
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path))

    def without_tools():
        with monkeypatch.context() as context:
            for name, value in NO_TOOLS.items():
                context.setenv(name, value)
            return doctor.examine()

    cold = without_tools()
    cpu = cold.features[0]
    assert (cpu.name, cpu.ok, cpu.mend) == ("CPU kernels", False, "apt-get install g++")
    assert "no C++ compiler found" in cpu.why and "0 of 1 modules are in the cache" in cpu.why
    demo = named(cold, "transformers models, demo")
    assert not demo.ok and "no CPU kernels: no C++ compiler found" in demo.why
    assert demo.mend.endswith("apt-get install g++")
    assert not cold.ok and "can neither be built nor are cached" in doctor.render(cold)
    eager = cold.features[-1]
    assert (eager.name, eager.required, eager.ok) == ("eager calls in C", False, False)
    assert not ahead.build([None])[0].failures
    warm = without_tools()
    assert warm.features[0].ok and "all 1 are in the cache" in warm.features[0].why
    assert named(warm, "transformers models, demo").ok
    extension = quick_call.why_in_python() is None
    assert warm.facts["cache"]["entries"] == 1 + extension
    assert warm.features[-1].ok == extension


def test_knows_that_a_read_only_cache_stops_no_build(monkeypatch, tmp_path):
    facts = {"path": str(tmp_path), "writable": False}
    monkeypatch.setenv("SGL_MOE_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(doctor._PROBES, "cache", lambda: facts)
    monkeypatch.setitem(doctor._PROBES, "host_compiler", lambda: {"path": "g++"})
    report = doctor.examine()
    cpu = report.features[0]
    assert cpu.ok and f"not kept: the cache folder {tmp_path} is not writable" in cpu.why
    assert cpu.mend.startswith("export SGL_MOE_JIT_CACHE_DIR=")
    monkeypatch.setattr(doctor, "_cached", lambda target: (6, 6))
    cpu = doctor.examine().features[0]
    assert (cpu.ok, cpu.why, cpu.mend) == (True, "all 6 are in the cache", "")


def test_sees_a_compiler_that_cannot_build(tmp_path, monkeypatch):
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


def test_with_a_wrong_cuda_home(tmp_path, monkeypatch):
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
def test_on_a_gpu_machine_requires_the_cuda_kernels(gpu, nvcc, ok, why, monkeypatch, tmp_path):
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
    demo = named(report, "transformers models, demo")  # it would run on the GPU
    assert demo.ok is ok and (ok or ("no CUDA kernels" in demo.why and cuda.mend in demo.mend))


@pytest.mark.parametrize("name", list(doctor._PROBES), ids="{}_probe".format)
def test_survives_any_failing_probe(name, monkeypatch):
    def fail():
        raise RuntimeError("probe broke")

    for other in doctor._PROBES:
        monkeypatch.setitem(doctor._PROBES, other, dict)
    monkeypatch.setitem(doctor._PROBES, name, fail)
    report = doctor.examine()
    assert report.facts[name] == {"error": "probe broke"}
    assert "probe broke" in doctor.render(report)
    json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("version", "ok", "why"),
    [
        (None, False, "transformers is not installed"),
        ("5.16.3", False, "transformers 5.16.3, expected 5.17 or newer"),
        ("5.17.0", True, "transformers 5.17.0"),
        ("6.0.0.dev0", True, "transformers 6.0.0.dev0"),
    ],
)
def test_models_need_transformers_and_kernels(version, ok, why):
    kernels = doctor.Feature("CPU kernels", True, True, "can be built on first use")
    facts = {"packages": {"transformers": version}}
    with_kernels = doctor._models_feature(facts, kernels)
    assert (with_kernels.ok, with_kernels.why) == (ok, why)
    assert with_kernels.mend == ("" if ok else "pip install 'sgl-moe-jit[transformers]'")
    broken = doctor.Feature("CPU kernels", True, False, "no compiler", "apt-get install g++")
    without = doctor._models_feature(facts, broken)
    assert not without.ok and without.why == f"{why}; no CPU kernels: no compiler"
    assert without.mend.endswith("apt-get install g++") and with_kernels.mend in without.mend
