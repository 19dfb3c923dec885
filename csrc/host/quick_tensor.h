// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_tensor.h: what a quick call asks of one torch tensor, in a few nanoseconds.
//
// Through Python's objects or DLPack's table each question costs 25 to 60 ns (a warning handler, a
// reference, the global lock), and a call asks some twenty. So this is the one file that knows
// torch's C++ classes. They are those of the very torch that runs: its version is part of the
// build's key, and its headers of the build's manifest.
#pragma once

#include <Python.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>
#include <dlpack/dlpack.h>

#include <cstring>

namespace {

// The one thing that light headers do not say: where in a Python tensor the pointer to the C++ one
// lies. Found by looking, as tensors tell the address themselves (`Tensor._cdata`).
class TensorLayout {
 public:
  // From pairs of a tensor and its address; false with an exception set.
  bool find(PyTypeObject* type, PyObject* pairs) {
    Py_ssize_t found = -1;
    for (Py_ssize_t at = sizeof(PyObject); at + Py_ssize_t{sizeof(void*)} <= type->tp_basicsize;
         at += sizeof(void*)) {
      bool everywhere = PyTuple_Check(pairs) && PyTuple_GET_SIZE(pairs) >= 2;
      for (Py_ssize_t i = 0; everywhere && i < PyTuple_GET_SIZE(pairs); ++i) {
        PyObject *x = nullptr, *address = nullptr;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "OO", &x, &address)) return false;
        everywhere = Py_TYPE(x) == type && word(x, at) == PyLong_AsVoidPtr(address);
      }
      if (!everywhere) continue;
      if (found >= 0) found = type->tp_basicsize;  // two places: neither is sure
      if (found < 0) found = at;
    }
    if (found < 0 || found >= type->tp_basicsize) {
      PyErr_SetString(PyExc_RuntimeError, "bind: this torch's tensors are laid out in another way");
      return false;
    }
    offset_ = found;
    return true;
  }

  // Of an object whose type is torch.Tensor itself, or a parameter.
  c10::TensorImpl& of(PyObject* x) const {
    return *static_cast<c10::TensorImpl*>(word(x, offset_));
  }

 private:
  static void* word(PyObject* x, Py_ssize_t offset) {
    void* result;
    std::memcpy(&result, reinterpret_cast<char*>(x) + offset, sizeof result);
    return result;
  }

  Py_ssize_t offset_ = 0;
};

// Fills a view of strided memory. False for all else: other layouts, wrappers of functorch and
// functionalization, pending negations and conjugations, zeros without memory, dtypes of no kernel.
inline bool view_of(c10::TensorImpl& x, DLTensor* out) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kStrange{
      DispatchKey::Negative,         DispatchKey::Conjugate,           DispatchKey::ZeroTensor,
      DispatchKey::Python,           DispatchKey::PythonTLSSnapshot,   DispatchKey::Functionalize,
      DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper};
  if (x.key_set().has_any(kStrange) || x.layout() != c10::kStrided || !x.has_storage()) {
    return false;
  }
  out->dtype.lanes = 1;
  out->dtype.bits = static_cast<uint8_t>(8 * x.itemsize());
  switch (c10::typeMetaToScalarType(x.dtype())) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Half:
      out->dtype.code = kDLFloat;
      break;
    case c10::ScalarType::BFloat16:
      out->dtype.code = kDLBfloat;
      break;
    case c10::ScalarType::Int:
      out->dtype.code = kDLInt;
      break;
    case c10::ScalarType::Float8_e4m3fn:
      out->dtype.code = kDLFloat8_e4m3fn;
      break;
    default:
      return false;
  }
  const c10::Device device = x.device();
  if (device.is_cpu()) {
    out->device = {kDLCPU, 0};
  } else if (device.is_cuda()) {
    out->device = {kDLCUDA, device.index()};
  } else {
    return false;
  }
  out->ndim = static_cast<int32_t>(x.dim());
  out->shape = const_cast<int64_t*>(x.sizes().data());
  out->strides = const_cast<int64_t*>(x.strides().data());
  out->byte_offset = 0;
  out->data = x.mutable_data();
  return out->data != nullptr || x.numel() == 0;
}

}  // namespace
