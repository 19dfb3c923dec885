# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of the extension need: modules made of Python functions, and calls to refuse."""

import ctypes

import pytest
import torch

from sgl_moe_jit.ops import finalize, quick_call
from tests.ops.finalize_cases import Inputs


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Value(ctypes.Union):
    _fields_ = (
        ("tensor", ctypes.POINTER(DLTensor)),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
    )


ALLOCATE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(DLTensor),
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class Call(ctypes.Structure):
    """As include/sgl_moe_jit/host/quick_call.h has it."""

    _fields_ = (
        ("values", ctypes.POINTER(Value)),
        ("given", ctypes.c_uint64),
        ("flags", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("cpu", ctypes.c_longlong * 3),
        ("allocate", ALLOCATE),
        ("made", ctypes.c_void_p * 4),
    )


MANAGED_DATA = 32  # where in a DLManagedTensorVersioned its tensor, and so the pointer, begins
QUICK_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(Call))


def need_extension():
    """Load the extension, or skip the test where this Python can have none."""
    why = quick_call.why_in_python()
    if why is not None:
        pytest.skip(why)
    assert quick_call.state() == (True, "")


def address_of(function):
    """Return a ``QUICK_FUNCTION``'s address as a module's ``quick_address`` does."""
    return ctypes.cast(function, ctypes.c_void_p).value


def served(i: Inputs, out=None, enable_pdl=None):
    """Return what the extension alone makes of a call: the output, or None."""
    call = finalize._QUICK.compiled
    tensors = (i.gemm2_out, i.idx, i.weights, i.shared, i.gate)
    return call(*tensors, i.top_k, enable_pdl, i.factor, i.hidden_dim, out)


def outcome(call):
    """Return an error's type and words; None where there is none."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None


class Subclass(torch.Tensor):
    pass


class SubParameter(torch.nn.Parameter):
    pass


# Arguments that only the long way may serve or refuse, by field of Inputs.
STRANGE = {
    "subclass": ("shared", lambda x: x.as_subclass(Subclass)),
    "subclass of a parameter": ("shared", lambda x: SubParameter(x, requires_grad=False)),
    "wants a gradient": ("weights", lambda x: x.clone().requires_grad_()),
    "negated": ("weights", torch._neg_view),
    "negated gate": ("gate", torch._neg_view),
    "zeros without memory": (
        "shared",
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    ),
    "sparse": ("shared", lambda x: x.to_sparse()),
    "meta": ("shared", lambda x: x.to("meta")),
    "list": ("idx", lambda x: x.tolist()),
    "no tensor": ("gemm2_out", lambda x: None),
    "dtype": ("idx", lambda x: x.long()),
    "complex": ("shared", lambda x: x.to(torch.complex64)),
    "strides": ("weights", lambda x: x.t().contiguous().t()),
    "shape": ("weights", lambda x: x[:, :3]),
    "bool for an int": ("top_k", lambda x: True),
    "float for an int": ("top_k", float),
    "large": ("top_k", lambda x: 2**70),
    "too large": ("top_k", lambda x: 65),
    "bool for a float": ("factor", bool),
    "large factor": ("factor", lambda x: 2**63),
    "tensor for a float": ("factor", torch.tensor),
    "width": ("hidden_dim", lambda x: 17),
    "large width": ("hidden_dim", lambda x: 2**64),
}
