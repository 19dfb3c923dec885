# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The doctor: what was found, what is missing for which feature, and the command that mends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sgl_moe_jit import env
from sgl_moe_jit.bench import doctor_probes as probes
from sgl_moe_jit.bench.doctor_probes import Facts

_PROBES: dict[str, Callable[[], Facts]] = {
    "system": probes.probe_system,
    "cpu": probes.probe_cpu,
    "torch": probes.probe_torch,
    "gpu": probes.probe_gpu,
    "host_compiler": probes.probe_host_compiler,
    "nvcc": probes.probe_nvcc,
    "cutlass": probes.probe_cutlass,
    "packages": probes.probe_packages,
    "cache": probes.probe_cache,
    "environment": probes.probe_environment,
}

_GET_NVCC = "pip install 'sgl-moe-jit[nvcc]'"
_GET_TRANSFORMERS = "pip install 'sgl-moe-jit[transformers]'"
_OLDEST_TRANSFORMERS = (5, 17)


@dataclass(frozen=True)
class Feature:
    """Whether one part of the library can work here.

    Attributes:
        name: What a user wants.
        required: Whether the exit status depends on it.
        ok: Whether it works.
        why: One line, either way.
        mend: The command that makes it work; empty when nothing is missing.
    """

    name: str
    required: bool
    ok: bool
    why: str
    mend: str = ""


@dataclass(frozen=True)
class Report:
    """Facts by probe (a failed probe holds only ``error``), and the verdicts drawn from them."""

    facts: dict[str, Facts]
    features: tuple[Feature, ...]

    @property
    def ok(self) -> bool:
        """Whether the kernels for this machine can be built or are cached."""
        return all(feature.ok for feature in self.features if feature.required)

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``doctor --json`` prints."""
        return {"ok": self.ok, **self.facts, "features": [asdict(f) for f in self.features]}


def _probe(probe: Callable[[], Facts]) -> Facts:
    try:
        return probe()
    except Exception as error:  # a report with a hole helps more than none
        return {"error": str(error) or type(error).__name__}


def _cached(target: str | None) -> tuple[int, int]:
    """Return ``(usable, shipped)`` modules of the CPU (None) or of a CUDA target."""
    from sgl_moe_jit.bench import ahead
    from sgl_moe_jit.jit import CudaArch, cache

    specs = ahead.specs_for(None if target is None else CudaArch.parse(target))
    found = [cache.find(spec, cache.key_of(spec)) for spec in specs]
    return sum(module is not None for module in found), len(found)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _brief(text: str) -> str:
    """Return an error's first sentence; the facts above the verdicts hold the whole."""
    return _first_line(text).split(". ")[0].rstrip(".:")


def _kernels(
    name: str, target: str | None, missing: list[tuple[str, str]], cache: Facts
) -> Feature:
    """Judge the kernels of one target: buildable when nothing is missing, else perhaps cached."""
    read_only = cache.get("writable") is False
    if not missing and not read_only:
        return Feature(name, True, True, "can be built on first use")
    why = "; ".join(_brief(reason) for reason, _ in missing)
    mend = " && ".join(dict.fromkeys(command for _, command in missing if command))
    try:
        usable, shipped = _cached(target)
    except Exception as error:
        return Feature(name, True, False, f"{why}; {_brief(str(error))}", mend)
    if usable == shipped:
        how = "cannot be built here, but all" if missing else "all"
        return Feature(name, True, True, f"{how} {shipped} are in the cache")
    if not missing:
        why = f"can be built, but not kept: the cache folder {cache['path']} is not writable"
        mend = f"export {env.CACHE_DIR.name}=<a folder you may write to>"
        return Feature(name, True, True, why, mend)
    return Feature(
        name, True, False, f"{why}; {usable} of {shipped} modules are in the cache", mend
    )


def _runtime_missing(facts: dict[str, Facts]) -> list[tuple[str, str]]:
    missing = []
    if "error" in facts["torch"]:
        missing.append((f"torch: {facts['torch']['error']}", "pip install 'torch>=2.10'"))
    if facts["packages"].get("apache-tvm-ffi") is None:
        missing.append(("apache-tvm-ffi is not installed", "pip install apache-tvm-ffi"))
    if "error" in facts["host_compiler"]:
        missing.append((facts["host_compiler"]["error"], "apt-get install g++"))
    return missing


def _cuda_feature(facts: dict[str, Facts], runtime_missing: list[tuple[str, str]]) -> Feature:
    name, gpu, nvcc = "CUDA kernels", facts["gpu"], facts["nvcc"]
    missing = list(runtime_missing)
    if "error" in nvcc:
        mend = "unset CUDA_HOME CUDA_PATH" if "expected bin/nvcc" in nvcc["error"] else _GET_NVCC
        missing.append((nvcc["error"], mend))
    if "error" in facts["cutlass"]:
        missing.append((facts["cutlass"]["error"], "pip install nvidia-cutlass"))
    if gpu.get("devices"):
        target = gpu["target"]
        if target is None:
            return Feature(name, True, False, gpu["target_error"], f"unset {env.CUDA_ARCH.name}")
        known = nvcc.get("targets")
        if known and target.rstrip("af") not in known:
            reason = f"nvcc {nvcc['version']} does not know {target}"
            missing.append((reason, _GET_NVCC + " && unset CUDA_HOME CUDA_PATH"))
        return _kernels(name, target, missing, facts["cache"])
    if "error" in gpu and facts["torch"].get("cuda"):
        return Feature(name, True, False, gpu["error"], "nvidia-smi   # is the driver well?")
    why, mend = "torch sees no GPU", ""
    if gpu.get("driver") is not None and facts["torch"].get("cuda") is None:
        why = f"a GPU driver is here, but torch {facts['torch'].get('version')} has no CUDA"
        mend = "pip install --force-reinstall torch   # a CUDA build"
    if missing:
        return Feature(name, False, False, f"{why}; {_brief(missing[0][0])}", mend or missing[0][1])
    why += "; kernels can be built ahead: python -m sgl_moe_jit compile --arch 9.0a"
    return Feature(name, False, not mend, why, mend)


def _models_feature(facts: dict[str, Facts], kernels: Feature) -> Feature:
    """Judge models and the demo, which need transformers, and kernels where they run."""
    found, missing = facts["packages"].get("transformers"), []
    why = "transformers is not installed" if found is None else f"transformers {found}"
    if found is None:
        missing.append(_GET_TRANSFORMERS)
    else:
        numbers = tuple(int(n) for n in found.split(".")[:2] if n.isdecimal())
        if len(numbers) >= 2 and numbers < _OLDEST_TRANSFORMERS:
            why += ", expected 5.17 or newer"
            missing.append(_GET_TRANSFORMERS)
    if not kernels.ok:
        why += f"; no {kernels.name}: {kernels.why}"
        missing.append(kernels.mend)
    mend = " && ".join(filter(None, missing))
    return Feature("transformers models, demo", False, not missing, why, mend)


def _optional_features(facts: dict[str, Facts], kernels: Feature) -> list[Feature]:
    packages, features = facts["packages"], [_models_feature(facts, kernels)]
    found = packages.get("flashinfer")
    name, mend = "flashinfer runners", "pip install 'sgl-moe-jit[flashinfer]'"
    if found is None:
        features.append(Feature(name, False, False, "flashinfer is not installed", mend))
    else:
        features.append(Feature(name, False, True, f"flashinfer {found}"))
    return features


def _quick_call_feature(facts: dict[str, Facts]) -> Feature:
    """Judge the extension without which eager calls spend more time in Python."""
    from sgl_moe_jit.ops import quick_call

    name = "eager calls in C"
    try:
        why = quick_call.why_in_python()
    except Exception as error:
        return Feature(name, False, False, _brief(str(error)))
    if why is not None:
        mend = "apt-get install python3-dev" if "headers" in why else ""
        if why.startswith(env.QUICK_CALL.name):
            mend = f"unset {env.QUICK_CALL.name}"
        return Feature(name, False, False, f"they stay in Python: {why}", mend)
    if "error" in facts["host_compiler"] and not quick_call.is_cached():
        return Feature(name, False, False, "no C++ compiler", "apt-get install g++")
    return Feature(name, False, True, "built with the first kernel, or cached")


def examine() -> Report:
    """Probe this machine. Never raises; of compilers it asks the version and one tiny build."""
    facts = {name: _probe(probe) for name, probe in _PROBES.items()}
    runtime_missing = _runtime_missing(facts)
    cpu = _kernels("CPU kernels", None, runtime_missing, facts["cache"])
    cuda = _cuda_feature(facts, runtime_missing)
    here = cuda if facts["gpu"].get("devices") else cpu  # where a model, and the demo, run
    quick = _quick_call_feature(facts)
    return Report(facts, (cpu, cuda, *_optional_features(facts, here), quick))


def _lines_of(name: str, facts: Facts) -> list[str]:
    rows: list[tuple[str, str]] = []
    for key, value in facts.items():
        if key == "devices":
            value = ", ".join(f"{d['name']} ({d['capability']})" for d in value) or None
        if isinstance(value, list):
            value = " ".join(map(str, value))
        shown = "none" if value is None else str(value)
        rows.append((key, _first_line(shown)))
        rows += [("", line.strip()) for line in shown.splitlines()[1:]]
    width = 14
    lines = []
    for i, (key, value) in enumerate(rows or [("", "nothing set")]):
        lines.append(
            f"{name.replace('_', ' ') if i == 0 else '':<14} {key:<{width}} {value}".rstrip()
        )
    return lines


def render(report: Report) -> str:
    """Return the report as text."""
    lines = [line for name, facts in report.facts.items() for line in _lines_of(name, facts)]
    lines += ["", "what works"]
    for feature in report.features:
        mark = "ok     " if feature.ok else "MISSING" if feature.required else "absent "
        lines.append(f"  {mark} {feature.name}: {feature.why}")
        if feature.mend:
            lines.append(f"          mend: {feature.mend}")
    verdict = "can be built or are cached" if report.ok else "can neither be built nor are cached"
    lines += ["", f"kernels for this machine {verdict}"]
    return "\n".join(lines)
