# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``silu_and_mul``: the SwiGLU activation between an expert's two projections, in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.jit import (
    BuildSpec,
    CudaArch,
    KernelFamily,
    cache_once,
    current_arch,
    load_spec,
    make_spec,
    register_family,
)
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.library import (
    NAMESPACE,
    can_bypass_dispatcher,
    cpu_isa,
    from_dispatcher,
    library,
    refuse_functional_gradients,
)

OP = "silu_and_mul"

# (C++ type, member of host::DType)
_CPP = {
    torch.bfloat16: ("cutlass::bfloat16_t", "kBFloat16"),
    torch.float16: ("cutlass::half_t", "kFloat16"),
    torch.float32: ("float", "kFloat32"),
}


def cuda_spec(dtype: torch.dtype, arch: CudaArch, cutlass: str = "cutlass") -> BuildSpec:
    """Return the CUDA module of a dtype.

    Args:
        dtype: bfloat16, float16 or float32.
        arch: CUDA target.
        cutlass: The header dependency; ``cutlass:<provider>`` asks for one provider's copy.
    """
    cpp_type, member = _CPP[dtype]
    return make_spec(
        (OP, member[1:]),
        cuda_files=["moe/activation.cu"],
        cpp_files=["moe/activation_binding.cc"],
        extra_cuda_cflags=[f"-DSMJ_ACTIVATION={cpp_type}"],
        extra_cflags=[f"-DSMJ_ACTIVATION_DTYPE={member}"],
        extra_dependencies=[cutlass],
        arch=arch,
    )


def _cpu_spec() -> BuildSpec:
    return make_spec((OP, "cpu"), cpp_files=["moe/activation_cpu.cc"])


def _all_cuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    for dtype in _CPP:
        yield cuda_spec(dtype, arch)


register_family(KernelFamily(OP, _all_cuda_specs, lambda: iter([_cpu_spec()])))


@cache_once
def _cpu_kernels() -> tuple[Any, Any]:
    """Return the exports that check an input, and that write an output."""
    module = load_spec(_cpu_spec())
    return module.check, module.silu_and_mul


@cache_once
def _cuda_kernel(dtype: torch.dtype, device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(cuda_spec(dtype, arch)).silu_and_mul, arch.supports_pdl


def _check(x: Tensor) -> None:
    """Check what decides which module is loaded, and the output's shape; the rest is C++'s."""
    if x.dtype not in _CPP:
        raise TypeError(
            f"x: expected bfloat16, float16 or float32, got {x.dtype}; convert it with .to()"
        )
    if x.dim() != 2 or x.shape[1] % 2 != 0:
        raise ValueError(f"x: expected [num_rows, 2 * width], got {tuple(x.shape)}")


def _output(x: Tensor) -> Tensor:
    return torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)


def _functional(x: Tensor) -> Tensor:
    _check(x)
    if x.device.type == "cpu":
        check, write = _cpu_kernels()
        check(x)
        out = _output(x)
        write(out, x, cpu_isa(), *cpu_workers())
        return out
    if x.device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(f"x: expected a CPU or NVIDIA CUDA tensor, got device {x.device}")
    kernel, pdl_supported = _cuda_kernel(x.dtype, x.device.index)
    out = _output(x)
    kernel(out, x, pdl_supported and env.PDL.get(), env.VECTOR.get())
    return out


def _fake(x: Tensor) -> Tensor:
    _check(x)
    return _output(x)


def _setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _autograd(ctx: Any, grad_out: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    gate, up = x.float().chunk(2, dim=-1)
    grad = grad_out.float()
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, grad * gate * sigmoid), dim=-1).to(x.dtype)


library.define(f"{OP}(Tensor x) -> Tensor")
for _key in ("CPU", "CUDA"):
    library.impl(OP, from_dispatcher(OP, _functional), _key)
torch.library.register_fake(f"{NAMESPACE}::{OP}", from_dispatcher(OP, _fake), lib=library)
torch.library.register_autograd(
    f"{NAMESPACE}::{OP}", _autograd, setup_context=_setup_context, lib=library
)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of ``x = [gate, up]``, computed in float32 and rounded once.

    torch's ``silu(gate) * up`` rounds twice in bfloat16 and float16 (after ``silu``, and after the
    product), so it differs from this op in the last bits of about a quarter of all elements; this
    op is the nearer one to the exact value.

    N rows, I columns of the result.

    Args:
        x: [N, 2I] bfloat16, float16 or float32, adjacent columns, any row stride. First half gate,
            second half up.

    Returns:
        [N, I], dtype of ``x``. Elementwise, bitwise repeatable, equal on CUDA and CPU; NaN where
        torch gives NaN (a gate of -infinity included). In float32 within 6e-7 of the exact value,
        relative, subnormals apart. In float16 a result beyond 65504 rounds to infinity.

    Raises:
        TypeError: not a tensor, or of a dtype not listed above.
        ValueError: not two dimensions, an odd width, or columns are not adjacent.
        ToolchainError, DependencyError, BuildError: first use only; the kernel could not be
            compiled.

    Gradients flow to ``x`` (plain torch backward, in float32).

    Cost: ``3 * A * N * I`` bytes, A the item size, and about 30 flops an element.
    Source: include/sgl_moe_jit/moe/activation.cuh, csrc/moe/activation_cpu.cc.
    Reference: sgl_moe_jit.ops.reference_permute.silu_and_mul.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a Tensor, got {type(x).__name__}")
    refuse_functional_gradients("silu_and_mul", x)
    function = _functional if can_bypass_dispatcher(x) else torch.ops.sgl_moe_jit.silu_and_mul
    result: Tensor = function(x)
    return result
