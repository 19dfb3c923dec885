# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What the machine code of sm_90a does with memory: widths, local memory, the wait of PDL."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from sgl_moe_jit.jit import toolchain
from tests.ops import compile_sass
from tests.ops.compile_batches import Call, call_nvcc
from tests.ops.compile_kernels import Kernel, reported_kernels
from tests.ops.compile_names import demangle, parse_name, template_parameters
from tests.ops.compile_report import ARCH
from tests.ops.compile_sass import Instruction, complaints, disassemble
from tests.ops.compile_variants import Variant, all_batches, batch_id

pytest_plugins = ("tests.ops.compile_fixture",)
pytestmark = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)


@pytest.fixture(scope="session")
def cuobjdump() -> Path:
    found = compile_sass.locate_cuobjdump()
    if found is None:
        pytest.skip(f"needs cuobjdump and nvdisasm: {compile_sass.PIP_COMMAND}")
    return found


@functools.cache
def kernels_and_code(cuobjdump: Path, call: Call) -> list[tuple[Kernel, list[Instruction]]]:
    kernels = [kernel for kernel in reported_kernels(call) if kernel.arch == ARCH.name]
    code = disassemble(cuobjdump, call.folder / "x.fatbin", ARCH.name)
    return [(kernel, code[kernel.symbol]) for kernel in kernels]


def batches_of_the_target() -> list[object]:
    return [
        pytest.param(batch, id=batch_id(batch)) for batch in all_batches() if ARCH in batch[0].archs
    ]


@pytest.mark.parametrize("batch", batches_of_the_target())
def test_kernels_wait_and_move_whole_vectors(cuobjdump, batch_builds, record_property, batch):
    inspected = [
        pair for call in batch_builds.calls(batch) for pair in kernels_and_code(cuobjdump, call)
    ]
    assert inspected
    found = [f"{k.label}: {text}" for k, code in inspected for text in complaints(k, code)]
    assert not found, "\n".join(found)
    wide = [k for k, _ in inspected if k.access_bytes >= 8]
    print(*(f"{len(code)} instructions: {k.label}" for k, code in inspected), sep="\n")
    record_property("kernels", len(inspected))
    record_property("with_vectors", len(wide))


def test_finalize_has_kernels_of_both_widths(cuobjdump, batch_builds):
    found = {
        kernel.access_bytes
        for call in batch_builds.calls(
            *(b for b in all_batches() if b[0].source.name == "finalize.cu")
        )
        for kernel, _ in kernels_and_code(cuobjdump, call)
        if "rows_in_flight" in kernel.args
    }
    assert found >= {8, 16}


KERNELS = """
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
template <typename Element, int kVec>
__global__ void good_kernel(const float4* p, float4* out) {
  WAIT;
  out[threadIdx.x] = p[threadIdx.x];
}
template <typename Element, int kVec>
__global__ void narrow_kernel(const Element* p, Element* out) {
  WAIT;
  for (int i = 0; i < kVec; ++i) out[threadIdx.x + i * 32] = p[threadIdx.x + i * 32];
}
__global__ void waitless_kernel(const float* p, float* out) { out[threadIdx.x] = p[threadIdx.x]; }
__global__ void early_kernel(const volatile float* p, float* out) {
  const float x = p[threadIdx.x];
  WAIT;
  out[threadIdx.x] = x;
}
__global__ void read_only_kernel(const float* __restrict__ p, float* __restrict__ out) {
  WAIT;
  out[threadIdx.x] = p[threadIdx.x];
}
__global__ void local_kernel(const int* p, int* out) {
  WAIT;
  int values[32];
  for (int i = 0; i < 32; ++i) values[i] = p[i];
  for (int i = 0; i < 32; ++i) values[values[i] % 32] += i;
  out[threadIdx.x] = values[p[threadIdx.x]];
}
template __global__ void good_kernel<float, 4>(const float4*, float4*);
template __global__ void narrow_kernel<float, 4>(const float*, float*);
"""
EXPECTED = {
    "good_kernel": [],
    "narrow_kernel": [
        "expected 1 or more loads of 16 bytes, got: 4x LDG.E",
        "expected stores of 16 bytes only, got: 4x STG.E",
    ],
    "waitless_kernel": ["no ACQBULK: never waits for its predecessor"],
    "early_kernel": [r"LDG.E.STRONG.SYS at 0x\w+, before ACQBULK at 0x\w+"],
    "read_only_kernel": ["loads by the read-only path: 1x LDG.E.CONSTANT"],
    "local_kernel": [r"\d+ accesses to local memory, such as STL\S*"],
}


def test_the_inspection_sees_what_it_looks_for(cuobjdump, tmp_path):
    source = tmp_path / "kernels.cu"
    source.write_text(KERNELS)
    batch = (Variant("kernels", source, ("-std=c++17", "-O3"), (), (ARCH,)),)
    call = call_nvcc(toolchain.require_cuda_toolkit().nvcc, batch, tmp_path / "out")
    assert call.status == 0, call.output
    parameters = template_parameters(KERNELS)
    seen = {}
    for kernel, code in kernels_and_code(cuobjdump, call):
        name, args = parse_name(demangle(kernel.symbol), parameters)
        seen[name] = list(complaints(dataclasses.replace(kernel, args=args), code))
    assert seen.keys() == EXPECTED.keys()
    for name, texts in EXPECTED.items():
        assert len(seen[name]) == len(texts), f"{name}: {seen[name]}"
        for text, got in zip(texts, seen[name], strict=True):
            assert re.fullmatch(text, got), f"{name}: {got}"


def test_the_toolkits_own_cuobjdump_goes_before_pips(monkeypatch, tmp_path):
    toolkit = dataclasses.replace(toolchain.require_cuda_toolkit(), root=tmp_path / "toolkit")
    monkeypatch.setattr(toolchain, "require_cuda_toolkit", lambda: toolkit)
    monkeypatch.setattr(toolchain, "pip_roots", lambda: iter([tmp_path / "pip"]))
    assert compile_sass.locate_cuobjdump() is None
    for root in ("pip", "toolkit"):
        folder = tmp_path / root / "bin"
        folder.mkdir(parents=True)
        (folder / "cuobjdump").touch()
        assert (
            compile_sass.locate_cuobjdump() != folder / "cuobjdump"
        )  # it could not start nvdisasm
        (folder / "nvdisasm").touch()
        assert compile_sass.locate_cuobjdump() == folder / "cuobjdump"
