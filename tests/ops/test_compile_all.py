# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every CUDA variant of every registered op compiles for every common target, without spills.

One nvcc call makes the machine code of all four targets, which costs about half of four calls. The
bindings differ by macros only, so whole modules are built for the first and last variant of an op.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import sgl_moe_jit.ops  # noqa: F401 - registers the shipped kernels
from sgl_moe_jit.jit import CudaArch, families, load_spec, toolchain

ARCHS = [CudaArch.parse(name) for name in ("sm_80", "sm_90a", "sm_100a", "sm_120f")]

pytestmark = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)


def device_command(spec, unit) -> tuple[str, ...]:
    """Return the flags and source of a unit, without target, dependency list and output."""
    roots = dict(spec.roots)
    words = [
        re.sub(r"roots/(\w+)", lambda match: str(roots[match.group(1)]), word)
        for word in unit.command[1:]
        if word != spec.arch.gencode()
    ]
    return tuple(words[: words.index("-MD")] + words[words.index("-c") + 1 : words.index("-o")])


def variants():
    """Group the device sources of all targets: one command and the targets it is for."""
    found: dict[tuple[str, tuple[str, ...]], list[CudaArch]] = {}
    for arch in ARCHS:
        for family in families():
            for spec in family.cuda_specs(arch):
                for unit in spec.units:
                    if unit.command[0] == "{nvcc}":
                        key = (spec.label, device_command(spec, unit))
                        found.setdefault(key, []).append(arch)
    return [pytest.param(cmd, archs, id=label) for (label, cmd), archs in found.items()]


@pytest.fixture(scope="module")
def nvcc() -> str:
    return str(toolchain.require_cuda_toolkit().nvcc)


@pytest.mark.parametrize(("command", "archs"), variants())
def test_a_variant_compiles_without_spills_or_warnings(
    nvcc, tmp_path, record_property, command, archs
):
    done = subprocess.run(
        [
            *(nvcc, *command, *(arch.gencode() for arch in archs)),
            *("-fatbin", "-Xptxas=-v", "--threads=2", "-o", str(tmp_path / "x.fatbin")),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "warning" not in output, output
    kernels = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        output,
        re.DOTALL,
    )
    assert {arch for _, arch, *_ in kernels} == {arch.name for arch in archs}
    spilled = [kernel for kernel in kernels if int(kernel[2]) or int(kernel[3])]
    assert not spilled, f"(kernel, target, bytes stored, bytes loaded, registers): {spilled}"
    for name, arch, _, _, registers in kernels:
        print(f"{arch}: {registers} registers: {name}")
    record_property("max_registers", max(int(kernel[4]) for kernel in kernels))


def whole_modules():
    found = []
    for family in families():
        specs = list(family.cuda_specs(ARCHS[1]))
        ends = {spec.label: spec for spec in (specs[0], specs[-1])}
        found += [pytest.param(spec, id=label) for label, spec in ends.items()]
    return found


@pytest.mark.parametrize("spec", whole_modules())
def test_a_whole_module_builds_and_loads(spec):
    assert load_spec(spec) is not None


def test_every_common_target_is_covered_for_every_op():
    for family in families():
        for arch in ARCHS:
            assert next(family.cuda_specs(arch)).arch == arch


def test_every_source_of_a_registered_module_exists():
    for family in families():
        for spec in (*family.cuda_specs(ARCHS[0]), *family.cpu_specs()):
            roots = dict(spec.roots)
            for unit in spec.units:
                if unit.text is None:
                    _, root, rest = unit.source.split("/", 2)
                    assert (Path(roots[root]) / rest).is_file()
