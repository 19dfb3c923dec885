# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""silu_and_mul on a CPU, and its CUDA module against both copies of CUTLASS (compile only)."""

import importlib.util
import shutil

import pytest
import torch

from sgl_moe_jit.jit import CudaArch, load_spec
from sgl_moe_jit.jit.cache import key_of
from sgl_moe_jit.ops import reference_permute as reference
from sgl_moe_jit.ops import silu_and_mul
from sgl_moe_jit.ops.activation import cuda_spec

OP = torch.ops.sgl_moe_jit.silu_and_mul.default
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32])


def gates(dtype, rows=64, width=96):
    """Gates from 1e-30 to beyond the exponential's range, of both signs."""
    x = torch.randn(rows, 2 * width)
    scale = torch.tensor([1.0, 8.0, 40.0, 90.0, 120.0, 1e-3, 1e-20, 1e-30]).repeat(rows // 8)
    x[:, :width] *= scale[:, None]
    return x.to(dtype)


def assert_within(got, x):
    error = (got.double() - reference.silu_and_mul(x)).abs()
    share = error / reference.silu_and_mul_tolerance(x)
    worst = int(share.argmax())
    assert share.max() <= 1, (
        f"{x.dtype} {tuple(x.shape)}: worst at flat {worst}: got {got.reshape(-1)[worst]}, "
        f"expected {reference.silu_and_mul(x).reshape(-1)[worst]}, {share.max():.2f} x allowed, "
        f"{int((share > 1).sum())} failed"
    )


def test_by_hand():
    x = torch.tensor([[0.0, 1.0, 3.0, -2.0]])
    want = torch.tensor([[0.0, -2.0 / (1 + 2.718281828459045**-1)]])
    torch.testing.assert_close(silu_and_mul(x), want, rtol=1e-6, atol=0)


@dtypes
def test_against_float64(dtype):
    x = gates(dtype)
    got = silu_and_mul(x)
    assert got.dtype == dtype and got.shape == (64, 96)
    assert_within(got, x)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_rounds_once_where_torch_rounds_twice(dtype):
    x = torch.randn(64, 2048).to(dtype)
    exact = reference.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    twice = (torch.nn.functional.silu(gate) * up).double()
    ours = (silu_and_mul(x).double() - exact).abs()
    assert ours.mean() < 0.9 * (twice - exact).abs().mean()
    assert (ours <= reference.silu_and_mul_tolerance(x)).all()


@dtypes
def test_every_instruction_set_and_thread_count_gives_the_same_bits(dtype, monkeypatch):
    x = gates(dtype, rows=512, width=1027)
    x[5, :40] = float("nan")
    x[6, :40] = float("inf")
    results = []
    threads = torch.get_num_threads()
    for isa in ("portable", "avx2", "avx512"):
        for num_threads in (1, 3):
            monkeypatch.setenv("SGL_MOE_JIT_CPU_ISA", isa)
            torch.set_num_threads(num_threads)
            try:
                results.append(silu_and_mul(x))
            except ValueError as error:
                assert "this CPU lacks" in str(error)
            finally:
                torch.set_num_threads(threads)
    assert len(results) >= 2
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    nan = results[0].isnan()  # its payload is not promised
    for other in results[1:]:
        assert torch.equal(other.isnan(), nan)
        assert ((other.view(bits) == results[0].view(bits)) | nan).all()


@dtypes
def test_infinities_and_nan_are_torchs(dtype):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, -inf, nan, 1.0, inf, 0.0, 2.0, 2.0, 2.0, nan, -2.0, inf]], dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    got = silu_and_mul(x)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()), got


def test_float16_rounds_to_infinity_only_beyond_its_range():
    # silu(50) is 50 in float32; the largest float16 is 65504, and half way to the next is 65520.
    x = torch.tensor([[50.0, 50.0, -50.0, 1310.0, 1311.0, 1311.0]], dtype=F16)
    assert silu_and_mul(x).tolist()[0][:2] == [65504.0, float("inf")]
    tiny = torch.tensor([[2.0**-24, 2.0**-24, 2.0**-23, 2.0, 1.0, 1.0]], dtype=F16)  # subnormal
    assert silu_and_mul(tiny).tolist() == [[2.0**-24, 0.0, 2.0**-24]]


def test_strided_rows_odd_widths_and_nothing():
    base = torch.randn(6, 40)
    view = base[:, 3:33]
    assert torch.equal(silu_and_mul(view), silu_and_mul(view.contiguous()))
    assert torch.equal(
        silu_and_mul(base[:3, :1].repeat(1, 2))[:, 0],
        silu_and_mul(torch.cat((base[:3, :1], base[:3, :1]), 1))[:, 0],
    )
    assert silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)
    assert silu_and_mul(torch.zeros(3, 0)).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (
            torch.zeros(2, 4, dtype=torch.int32),
            TypeError,
            "x: expected bfloat16, float16 or float32",
        ),
        (
            torch.zeros(2, 4).double(),
            TypeError,
            "float16 or float32, got torch.float64; convert it",
        ),
        (torch.zeros(2, 3), ValueError, r"x: expected \[num_rows, 2 \* width\], got \(2, 3\)"),
        (torch.zeros(8), ValueError, r"x: expected \[num_rows, 2 \* width\], got \(8,\)"),
        (torch.zeros(4, 8).t(), ValueError, "x: expected adjacent columns"),
    ],
)
def test_errors(x, error, match):
    with pytest.raises(error, match=match):
        silu_and_mul(x)


@pytest.mark.field_report("A17")
@dtypes
def test_gradient(dtype):
    x = torch.randn(7, 24).to(dtype).requires_grad_()
    seed = torch.randn(7, 12).to(dtype)
    (grad,) = torch.autograd.grad(silu_and_mul(x), x, seed)
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference.silu_and_mul(exact), exact, seed.double())
    # its own rounding, half of a subnormal too, and about ten float32 operations on terms no larger
    # than |seed| (1 + |x|)^2
    rounding = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}[dtype]
    subnormal = {BF16: 2.0**-133, F16: 2.0**-24, F32: 2.0**-149}[dtype]
    terms = seed.double().abs() * (1 + x.detach().double().abs().amax()) ** 2
    allowed = want.abs() * rounding + subnormal / 2 + 10 * 2.0**-24 * terms.repeat(1, 2)
    assert ((grad.double() - want).abs() <= allowed).all()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    torch.library.opcheck(OP, (torch.randn(5, 8, requires_grad=requires_grad),))


def test_compile_fullgraph():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: silu_and_mul(x + 1) * 2, fullgraph=True, dynamic=True, backend="eager"
    )
    for rows in (3, 5, 0):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), silu_and_mul(x + 1) * 2)


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
SM90 = CudaArch.parse("sm_90a")


@needs_nvcc
def test_builds_against_the_cutlass_of_nvidia_cutlass():
    assert load_spec(cuda_spec(BF16, SM90, "cutlass:nvidia-cutlass")).silu_and_mul is not None


@needs_nvcc
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="needs flashinfer's bundled CUTLASS: pip install --no-deps flashinfer-python",
)
def test_builds_against_the_cutlass_of_flashinfer_under_another_key():
    bundled = cuda_spec(BF16, SM90, "cutlass:flashinfer")
    assert key_of(bundled) != key_of(cuda_spec(BF16, SM90, "cutlass:nvidia-cutlass"))
    assert load_spec(bundled).silu_and_mul is not None
