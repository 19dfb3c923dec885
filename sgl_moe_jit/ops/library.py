# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The one ``torch.library.Library`` of all ops, and when eager calls may pass it by."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from sgl_moe_jit import env
from sgl_moe_jit.ops.cpu_threads import cpu_workers

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "sgl_moe_jit"
library = torch.library.Library(NAMESPACE, "DEF")

_function_modes = torch._C._len_torch_function_stack
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


_NO_FORWARD_AD = (
    "{op}: has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad); use reverse mode, "
    "or sgl_moe_jit.ops.reference"
)
_NO_FUNCTIONAL_GRAD = (
    "{op}: has no gradient under torch.func (grad, vjp, jacrev), which torch.library's register_"
    "autograd does not serve; use torch.autograd.grad or .backward() on inputs that require_grad_, "
    "or torch.no_grad() around the call if its gradient is not wanted"
)
_functorch = torch._C._functorch
_GRAD = _functorch.TransformType.Grad

# As numbered by host::CpuIsa; -1 takes the best this machine has.
_CPU_ISA = {"auto": -1, "portable": 0, "avx2": 1, "avx512": 2}


def cpu_isa() -> int:
    """Return the number of ``SGL_MOE_JIT_CPU_ISA`` for a CPU kernel."""
    return _CPU_ISA[env.CPU_ISA.get()]


def cpu_settings() -> tuple[int, int, int]:
    """Return what a CPU kernel takes last: instruction set, threads, OpenMP's entry point."""
    return cpu_isa(), *cpu_workers()


def is_watched_by_function_mode() -> bool:
    """Whether a torch function mode is active that could see a call.

    The one of ``torch.set_default_device`` and ``with torch.device(...)`` only tells constructors
    the device.
    """
    at = torch._C._get_function_stack_at
    return any(type(at(level)) is not DeviceContext for level in range(_function_modes()))


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether calling a kernel directly does what the dispatcher would do.

    A tvm-ffi call drops gradients and ignores modes and subclasses silently, so the shortcut is
    taken only when nothing requires a gradient, nothing traces, no mode or functorch level is
    active and every tensor is plain: strided, with no negation pending and a storage of its own.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or is_watched_by_function_mode():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN_TYPES or (grad and x.requires_grad):
            return False
        if x.is_neg() or x._is_zerotensor() or x.layout is not torch.strided:
            return False
        if not (x.is_cpu or x.is_cuda):
            return False
    return True


def has_no_values(*tensors: Tensor) -> bool:
    """Whether an operation on these computes shapes alone: traced code, fake and meta tensors.

    ``make_fx``, ``aot_module`` and other tracers outside ``torch.compile`` do not count as
    compiling, but trace with fake tensors, where sizes are to stay symbolic and where not.
    """
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(x, (FakeTensor, FunctionalTensor)) or x.is_meta for x in tensors)


def from_dispatcher(op: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` as the dispatcher may call it: refusing inside a forward-mode level.

    The dispatcher has stripped tangents by then, so that they would be lost without a word.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if forward_ad._current_level >= 0:
            raise NotImplementedError(_NO_FORWARD_AD.format(op=op))
        return function(*args, **kwargs)

    return call


def refuse_functional_gradients(op: str, *tensors: Tensor | None) -> None:
    """Refuse inputs with a tangent or a gradient of ``torch.func``.

    The dispatcher would drop a forward-mode tangent silently, and refuse ``torch.func.grad`` with
    words about ``autograd.Function`` that do not name the op.

    Raises:
        NotImplementedError: names the op and the way out.
    """
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0:
        for x in tensors:
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(_NO_FORWARD_AD.format(op=op))
    if _functorch.peek_interpreter_stack() is None or not torch.is_grad_enabled():
        return
    levels = {i.level() for i in _functorch.get_interpreter_stack() or () if i.key() == _GRAD}
    for x in tensors:
        while x is not None and _functorch.is_functorch_wrapped_tensor(x):
            if x.requires_grad and _functorch.maybe_get_level(x) in levels:
                raise NotImplementedError(_NO_FUNCTIONAL_GRAD.format(op=op))
            x = _functorch.get_unwrapped(x)  # the level below, which vmap covers


def check_writable(out: Tensor) -> None:
    """Refuse an ``out`` that an in-place torch operation would refuse.

    Raises:
        RuntimeError: an inference tensor, outside inference mode.
    """
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "out: an inference tensor may only be written in torch.inference_mode(); pass a clone"
        )


def mark_written(out: Tensor) -> None:
    """Tell autograd that a kernel wrote ``out``, as an in-place torch operation does."""
    torch._C._increment_version((out,))  # passes inference tensors by
