# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Every CUDA variant of every registered op compiles for every common target, without spills.

The bindings differ by macros only, so whole modules are built for the first and last variant of an
op.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from sgl_moe_jit.jit import families, load_spec, toolchain
from tests.ops import compile_batches
from tests.ops.compile_batches import Batch, Call, call_nvcc, compile_batch, named_namespaces
from tests.ops.compile_kernels import reported_kernels
from tests.ops.compile_variants import (
    ARCHS,
    MOST_VARIANTS,
    Variant,
    all_batches,
    batch_id,
    can_share_headers,
    make_batches,
    variants_of,
)

pytest_plugins = ("tests.ops.compile_fixture",)
pytestmark = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)


@pytest.mark.parametrize("batch", all_batches(), ids=batch_id)
def test_a_batch_compiles_without_spills_or_warnings(batch_builds, record_property, batch):
    calls = batch_builds.calls(batch)
    for call in calls:
        assert call.status == 0, f"{batch_id(call.batch)}:\n{call.messages}"
    kernels = [kernel for call in calls for kernel in reported_kernels(call)]
    missing = {arch.name for arch in batch[0].archs} - {kernel.arch for kernel in kernels}
    assert not missing, f"no kernel for {missing}"
    local = [f"{k.arch} {k.label}: {k.local_bytes}" for k in kernels if any(k.local_bytes)]
    assert not local, "(bytes of stack, stored, loaded):\n" + "\n".join(local)
    for call in calls:
        assert "warning" not in call.messages, call.messages
    print(*(f"{k.arch} {k.registers}/{k.limit} registers: {k.label}" for k in kernels), sep="\n")
    record_property("kernels", len(kernels))
    record_property("max_registers", max(kernel.registers for kernel in kernels))


def test_a_source_with_many_variants_is_compiled_in_batches(batch_builds):
    # Or CI would take several times as long; compile_batches.py has the times.
    for batch in all_batches():
        assert len(batch_builds.calls(batch)) == 1, (
            f"{batch_id(batch)}: one call for all of it failed"
        )
    by_source: dict[Path, list[Variant]] = {}
    for batch in all_batches():
        by_source.setdefault(batch[0].source, []).extend(batch)
    for source, variants in by_source.items():
        shares = len(variants) <= MOST_VARIANTS or can_share_headers(variants)
        assert shares, f"{source}: one of its headers names one of its macros"


def ends_of_families() -> list[tuple[str, object]]:
    """Return the first and last module of each op."""
    found = {}
    for family in families():
        specs = list(family.cuda_specs(ARCHS[1]))
        found |= {spec.label: spec for spec in (specs[0], specs[-1])}
    return [pytest.param(spec, id=label) for label, spec in found.items()]


@pytest.mark.parametrize("spec", ends_of_families())
def test_a_whole_module_builds_and_loads(spec):
    assert load_spec(spec) is not None


@pytest.mark.parametrize("spec", ends_of_families())
def test_a_batch_holds_the_kernels_of_a_call_of_its_own(batch_builds, tmp_path, spec):
    batched = {
        kernel.symbol: kernel
        for batch in all_batches()
        if spec.arch in batch[0].archs and any(v.label == spec.label for v in batch)
        for call in batch_builds.calls(batch)
        for kernel in reported_kernels(call)
        if kernel.arch == spec.arch.name
    }
    nvcc = toolchain.require_cuda_toolkit().nvcc
    for i, variant in enumerate(variants_of([spec])):
        alone = call_nvcc(nvcc, (variant,), tmp_path / str(i))
        kernels = reported_kernels(alone)
        assert kernels
        for kernel in kernels:
            assert batched[kernel.symbol] == kernel


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


SOURCE = """
namespace a {
__global__ void kernel(int* p) { *p = SIZE; }
}
"""


def write_variants(folder: Path, text: str, sizes: list[str]) -> Batch:
    path = folder / "source.cu"
    path.write_text(text)
    return tuple(
        Variant(f"size{size}", path, (f"-I{folder}",), (("SIZE", size),), ARCHS[1:2])
        for size in sizes
    )


def test_a_failing_variant_of_a_batch_is_named(tmp_path):
    batch = write_variants(tmp_path, SOURCE, ["1", "nonsense", "3"])
    calls = compile_batch(toolchain.require_cuda_toolkit().nvcc, batch, tmp_path / "out")
    assert [(call.batch[0].label, call.status == 0) for call in calls] == [
        ("size1", True),
        ("sizenonsense", False),
        ("size3", True),
    ]
    assert "nonsense" in calls[1].output


def test_a_source_whose_header_reads_a_macro_gets_a_call_a_variant(tmp_path):
    (tmp_path / "header.cuh").write_text("constexpr int size = SIZE;\n")
    batch = write_variants(tmp_path, SOURCE, ["1", "2"])
    assert make_batches(batch) == [batch]
    batch = write_variants(tmp_path, '#include "header.cuh"\n' + SOURCE, ["1", "2"])
    assert not can_share_headers(batch)
    assert make_batches(batch) == [batch[:1], batch[1:]]


def test_a_batch_is_compiled_again_where_a_process_died_over_it(tmp_path, monkeypatch):
    batch, dying = write_variants(tmp_path, SOURCE, ["1"]), [True]

    def compile_it(nvcc, batch, folder):
        (folder / "all").mkdir(parents=True)
        if dying:
            raise RuntimeError("it dies")
        return [Call(batch, 0, "", folder)]

    monkeypatch.setattr(compile_batches, "compile_batch", compile_it)
    first, second = (compile_batches.Builds(tmp_path / "batches", 2) for _ in range(2))
    with pytest.raises(RuntimeError, match="it dies"):
        first.calls(batch)
    first.close()
    dying.clear()
    assert [call.batch for call in second.calls(batch)] == [batch]
    second.close()


def test_the_variants_of_an_interrupted_batch_are_not_tried(tmp_path):
    batch, nvcc = write_variants(tmp_path, SOURCE, ["1", "2", "3"]), tmp_path / "nvcc"
    script = 'echo "$TMPDIR" >> ../../calls; echo cicc died due to signal 2 >&2; exit 2'
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    with pytest.raises(CancelledError):
        compile_batch(nvcc, batch, tmp_path / "out")
    assert (tmp_path / "calls").read_text() == f"{tmp_path}/out/all/keep\n"


def test_namespaces_are_read_in_their_nesting():
    text = (
        'namespace a { // }\nnamespace { int x[] = {1}; }\nnamespace b::c { char y = "}"[0]; }\n}\n'
    )
    assert named_namespaces(text) == [("a",), ("a", "b"), ("a", "b", "c")]
