# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""moe_finalize_fuse_shared on a CPU: the same bits whatever instructions and threads there are."""

from dataclasses import replace

import pytest
import torch

from tests.ops.finalize_cases import BF16, F16, F32, Inputs, assert_same_bits, bits, make

dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
ISAS = ["portable", "avx2", "avx512"]


def run_on(isa: str, inputs: Inputs, monkeypatch) -> torch.Tensor | None:
    """The result on an instruction set; None when this CPU lacks it."""
    monkeypatch.setenv("SGL_MOE_JIT_CPU_ISA", isa)
    try:
        return inputs.run()
    except ValueError as error:
        assert "this CPU lacks the instructions" in str(error)
        assert isa.startswith("avx")
        return None


def runs(inputs: Inputs, monkeypatch) -> list[torch.Tensor]:
    """The result on each instruction set that this CPU has, portable first."""
    results = [run_on(isa, inputs, monkeypatch) for isa in (*ISAS, "auto")]
    return [x for x in results if x is not None]


# H: below a tile of 64, one, a tail of one and of 63, several strips with a tail.
@dtypes
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16, None], ids=["w32", "w16", "wh", "unit"])
@pytest.mark.parametrize("hidden", [1, 37, 64, 65, 127, 1091])
def test_instruction_sets_agree(dtype, weight_dtype, hidden, monkeypatch):
    for gate, factor, shared in ((None, 1.0, True), (F32, 2.5, True), (None, -0.5, False)):
        inputs = make(
            7,
            5,
            hidden,
            padded=hidden + 3,
            dtype=dtype,
            weight_dtype=weight_dtype,
            gate=gate,
            factor=factor,
            shared=shared,
            absent=0.4,
            seed=hidden,
        )
        first, *others = runs(inputs, monkeypatch)
        for other in others:
            assert_same_bits(other, first)


@dtypes
def test_instruction_sets_agree_on_every_kind_of_value(dtype, monkeypatch):
    """Rows of random bits: subnormals, infinities and NaN among them; sums that overflow."""
    inputs = make(40, 3, 515, dtype=dtype, gate=dtype, absent=0.1)
    generator = torch.Generator().manual_seed(1)

    def random_bits(like):
        integer = torch.int16 if dtype.itemsize == 2 else torch.int32
        info = torch.iinfo(integer)
        drawn = torch.randint(info.min, info.max + 1, like.shape, generator=generator)
        return drawn.to(integer).view(dtype)

    inputs = replace(
        inputs,
        gemm2_out=random_bits(inputs.gemm2_out),
        shared=random_bits(inputs.shared),
        weights=torch.randn(40, 3, generator=generator).exp2(),
    )
    first, *others = runs(inputs, monkeypatch)
    assert first.isnan().any() and first.isinf().any() and first.isfinite().any()
    for other in others:
        different = (bits(other) != bits(first)) & ~(other.isnan() & first.isnan())
        assert not different.any(), f"{int(different.sum())} of {first.numel()} differ"


# Fewer tokens than threads: they share one, at a boundary of slabs.
@dtypes
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 16384 + 37), (3, 7168), (50, 515)])
def test_thread_counts_agree(dtype, num_tokens, hidden):
    inputs = make(num_tokens, 16, hidden, dtype=dtype, factor=2.5)
    idx = inputs.idx.clone()
    idx[-1] = -1  # copied in parts
    inputs = replace(inputs, idx=idx)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(inputs.run())
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert_same_bits(result, results[0])


# More than kStreamBytes of traffic: output is written past the caches, where it is aligned.
@pytest.mark.parametrize("isa", ["auto", "avx2"])
@pytest.mark.parametrize(("dtype", "num_tokens"), [(BF16, 300), (F16, 300), (F32, 150)])
def test_large_calls(dtype, num_tokens, isa, monkeypatch):
    if run_on(isa, make(1, 1, 8), monkeypatch) is None:
        pytest.skip("this CPU lacks the instruction set")
    hidden = 7168 - 32  # rows of whole cache lines, and a tail of half a tile
    inputs = make(num_tokens, 8, hidden, dtype=dtype, shared=False)
    assert inputs.gemm2_out.nbytes > 32 << 20
    want = torch.cat([inputs.tokens(t, t + 50).run() for t in range(0, num_tokens, 50)])
    assert_same_bits(inputs.run(), want)
    for offset in (0, 1):  # aligned with a gap between rows, and not
        wide = torch.full((num_tokens, hidden + 32), float("nan"), dtype=dtype)
        view = wide[:, offset : hidden + offset]
        assert view.data_ptr() % 64 == offset * dtype.itemsize
        assert_same_bits(inputs.run(out=view), want)
        assert wide[:, :offset].isnan().all() and wide[:, hidden + offset :].isnan().all()
