# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""No kernel takes more registers than register_bounds.txt records."""

from __future__ import annotations

import dataclasses

import pytest

from sgl_moe_jit.jit import toolchain
from tests.ops import compile_report
from tests.ops.compile_kernels import Kernel, launch_bounds, of_target, register_limit
from tests.ops.compile_names import demangle, parse_name, template_parameters
from tests.ops.compile_report import ARCH, COMMAND, Entry, is_hot, most_registers, place_of
from tests.ops.compile_variants import all_batches

pytest_plugins = ("tests.ops.compile_fixture",)

needs_nvcc = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)

HEADER = """
template <int vec, bool prefetch>
struct Shape {};
template <typename Act, int kTopK, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads, Shape::kMinBlocks)
    sum_kernel(const Params p) {
"""
KERNEL = Kernel(
    symbol="_Z",
    name="sum_kernel",
    args={"Act": "bf16", "Weight": "f32", "kTopK": "8", "vec": "8", "min_blocks": "8"},
    arch=ARCH.name,
    registers=56,
    limit=64,
    local_bytes=(0, 0, 0),
)


def with_args(**args: str) -> Kernel:
    return dataclasses.replace(KERNEL, args=KERNEL.args | args)


def shortened(lines: list[str], most: int = 30) -> str:
    return "\n".join([*lines[:most], f"({len(lines)} in all)"])


@needs_nvcc
@pytest.mark.timeout(1800)  # run by itself, it compiles every batch
def test_no_kernel_takes_more_registers_than_recorded(batch_builds, record_property):
    compiler, recorded = compile_report.read_text(compile_report.FILE.read_text(encoding="utf-8"))
    if compiler != compile_report.release():
        pytest.skip(f"recorded with nvcc {compiler}, this is nvcc {compile_report.release()}")
    kernels = {place_of(k): k for k in of_target(batch_builds.calls(*all_batches()), ARCH.name)}
    now = compile_report.entries(kernels.values())
    unknown = [" ".join(place) for place in sorted(now.keys() ^ recorded.keys())]
    assert not unknown, f"not in both, file and registry; run {COMMAND}:\n{shortened(unknown)}"
    over = [
        f"{k.label}: {k.registers} registers, recorded {recorded[place].registers}, "
        f"at most {most_registers(k, recorded[place])}"
        for place, k in kernels.items()
        if k.registers > most_registers(k, recorded[place])
    ]
    assert not over, f"if it must be, run {COMMAND}:\n{shortened(over)}"
    changed = [
        f"{k.label}: {k.limit}, recorded {recorded[place].limit}"
        for place, k in kernels.items()
        if k.limit != recorded[place].limit
    ]
    assert not changed, f"other launch bounds than recorded; run {COMMAND}:\n{shortened(changed)}"
    hot = {place: k for place, k in kernels.items() if is_hot(k)}
    assert hot, "no kernel for bfloat16 rows, float32 weights and 8 slots"
    record_property("hot", {k.label: k.registers for k in hot.values()})


@needs_nvcc
def test_the_file_is_as_the_command_writes_it():
    text = compile_report.FILE.read_text(encoding="utf-8")
    compiler, recorded = compile_report.read_text(text)
    assert compile_report.write_text(recorded, compiler) == text


def test_every_register_counts_in_a_hot_kernel_only():
    assert most_registers(KERNEL, Entry(54, 64)) == 54
    others = ({"kTopK": "6"}, {"Weight": "bf16"}, {"Act": "f16"}, {"vec": "4"}, {"Word": "uint4"})
    for other in others:
        assert most_registers(with_args(**other), Entry(54, 64)) == 56
        assert most_registers(with_args(**other), Entry(56, 64)) == 56


def test_two_kernels_for_one_place_are_refused():
    with pytest.raises(ValueError, match=r"one place for sum_kernel .* and sum_kernel"):
        compile_report.entries([KERNEL, with_args(rows_in_flight="4")])


def test_a_name_has_the_parameters_of_the_source():
    parameters = template_parameters(HEADER)
    assert parameters == {
        "Shape": ["vec", "prefetch"],
        "sum_kernel": ["Act", "kTopK", "Shape"],
    }
    text = "void a::b::sum_kernel<__nv_bfloat16, 8, a::b::Shape<4, true> >(a::Params)"
    assert parse_name(text, parameters) == (
        "sum_kernel",
        {"Act": "bf16", "kTopK": "8", "vec": "4", "prefetch": "true"},
    )
    assert parse_name("a::plain_kernel(a::Params, int)", parameters) == ("plain_kernel", {})
    assert demangle("_ZN1a12plain_kernelEi") == "a::plain_kernel(int)"


def test_launch_bounds_are_those_of_the_ptx():
    ptx = """
.visible .entry one(.param .b32 p)
.maxntid 448, 1, 1
.minnctapersm 2
{ ret; }
.visible .entry two() { ret; }
"""
    assert launch_bounds(ptx) == {"one": (448, 2), "two": (1024, 1)}


@pytest.mark.parametrize(
    ("threads", "blocks", "limit"),
    # 65536 registers, 64 warps of 32 at most 255 each; 14 warps twice are 7 in each of four parts.
    [(128, 8, 64), (128, 6, 80), (448, 2, 72), (256, 1, 255), (1024, 1, 64), (512, 1, 128)],
)
def test_the_limit_is_what_leaves_room_for_the_blocks(threads, blocks, limit):
    assert register_limit(threads, blocks) == limit
