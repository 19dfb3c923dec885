// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_torch.h: what a quick call asks of torch and of the environment, for every op alike.
#pragma once

#include <Python.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <dlpack/dlpack.h>

#include "quick_python.h"
#include "quick_tensor.h"

// Of torch/csrc/autograd/python_variable.h, which takes 13 s to compile.
namespace at {
class TensorBase;
}
PyObject* THPVariable_Wrap(const at::TensorBase&);

namespace {

// The object of that name, for ever; nullptr with an exception set when it is missing.
inline PyObject* keep(PyObject* named, const char* name) {
  PyObject* found = PyDict_GetItemString(named, name);
  if (found == nullptr) PyErr_Format(PyExc_TypeError, "bind: %s is missing", name);
  Py_XINCREF(found);
  return found;
}

// The type's attribute of that name, the same way.
inline PyObject* keep_attribute(PyTypeObject* type, const char* name) {
  return PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
}

struct Torch {
  PyTypeObject* tensor = nullptr;  // the last to be set
  PyTypeObject* parameter = nullptr;
  const DLPackExchangeAPI* dlpack = nullptr;
  TensorLayout tensors;
  NoArguments function_modes, is_watched, is_tracing;  // watched: by one of these modes
  PyObject* cpu_settings = nullptr;                    // returns QuickCall::cpu
  PyObject* forward_ad = nullptr;                      // the module's dict
  PyObject* level_name = nullptr;

  // Returns false with an exception set.
  bool bind(PyObject* named) {
    PyObject* type = keep(named, "tensor");
    PyObject* subtype = keep(named, "parameter");
    cpu_settings = keep(named, "cpu_settings");
    forward_ad = keep(named, "forward_ad");
    level_name = PyUnicode_InternFromString("_current_level");
    if (!type || !subtype || !cpu_settings || !forward_ad || !level_name) return false;
    if (!PyType_Check(type) || !PyDict_Check(forward_ad)) {
      PyErr_SetString(PyExc_TypeError, "bind: expected a type as tensor, a dict as forward_ad");
      return false;
    }
    PyTypeObject* of = reinterpret_cast<PyTypeObject*>(type);
    parameter = reinterpret_cast<PyTypeObject*>(subtype);
    if (!PyType_Check(subtype) || !PyType_IsSubtype(parameter, of)) {
      PyErr_SetString(PyExc_TypeError, "bind: expected a type of tensors as parameter");
      return false;
    }
    const Owned examples(keep(named, "examples"));
    if (!examples || !tensors.find(of, examples.get()) ||
        !function_modes.set(keep(named, "function_modes")) ||
        !is_watched.set(keep(named, "is_watched")) || !is_tracing.set(keep(named, "is_tracing")) ||
        !find_dlpack(of) || !find_handles(examples.get())) {
      return false;
    }
    tensor = of;
    return true;
  }

  // Whether x is of torch's own types, whose operations nothing but modes may replace.
  bool is_tensor(PyObject* x) const { return Py_TYPE(x) == tensor || Py_TYPE(x) == parameter; }

  // Whether nothing is active that must see the call: a mode, a trace, a forward-mode level.
  bool is_plain_moment() const {
    if (c10::impl::TorchDispatchModeTLS::stack_len() != 0 || is_tracing.truth() != 0 ||
        (function_modes.truth() != 0 && is_watched.truth() != 0)) {
      return false;
    }
    PyObject* level = PyDict_GetItemWithError(forward_ad, level_name);
    return level != nullptr && PyLong_Check(level) && PyLong_AsLong(level) < 0;
  }

  // Python's tensor for one of torch's allocator, which is given up; nullptr with an exception.
  //
  // DLPack's conversion makes a second tensor around the first one's memory: one that cannot be
  // resized, and whose record_stream() does nothing, as the memory is not known to be torch's.
  PyObject* wrap(DLManagedTensorVersioned* made) const {
    if (made->deleter != torchs_deleter_ || torchs_deleter_ == nullptr) {
      void* result = nullptr;
      const int status = dlpack->managed_tensor_to_py_object_no_sync(made, &result);
      return status == 0 ? static_cast<PyObject*>(result) : nullptr;
    }
    PyObject* result = THPVariable_Wrap(handle_of(made));
    made->deleter(made);
    return result;
  }

 private:
  // The tensor that torch keeps in what it exports: a pointer to the C++ one.
  static const at::TensorBase& handle_of(const DLManagedTensorVersioned* exported) {
    return *static_cast<const at::TensorBase*>(exported->manager_ctx);
  }

  // Whether that is so is found by looking. Returns false with an exception set.
  bool find_handles(PyObject* examples) {
    bool everywhere = true;
    for (Py_ssize_t i = 0; everywhere && i < PyTuple_GET_SIZE(examples); ++i) {
      PyObject* x = PyTuple_GET_ITEM(PyTuple_GET_ITEM(examples, i), 0);
      DLManagedTensorVersioned* exported = nullptr;
      if (dlpack->managed_tensor_from_py_object_no_sync(x, &exported) != 0) return false;
      const void* impl = nullptr;
      if (exported->manager_ctx) std::memcpy(&impl, exported->manager_ctx, sizeof impl);
      everywhere =
          impl == &tensors.of(x) && Owned(THPVariable_Wrap(handle_of(exported))).get() == x;
      torchs_deleter_ = exported->deleter;
      exported->deleter(exported);
    }
    if (!everywhere) torchs_deleter_ = nullptr;
    return true;
  }

  void (*torchs_deleter_)(DLManagedTensorVersioned*) = nullptr;

  bool find_dlpack(PyTypeObject* type) {
    const Owned capsule(keep_attribute(type, "__dlpack_c_exchange_api__"));
    if (!capsule) return false;
    const auto* api = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
    if (api == nullptr) return false;
    if (api->header.version.major != DLPACK_MAJOR_VERSION || !api->managed_tensor_allocator ||
        !api->managed_tensor_from_py_object_no_sync || !api->managed_tensor_to_py_object_no_sync ||
        !api->current_work_stream) {
      PyErr_SetString(PyExc_RuntimeError, "bind: this torch has another DLPack interface");
      return false;
    }
    dlpack = api;
    return true;
  }
};

// The launch flags, parsed anew by Python when one of the texts is another object.
struct Environment {
  PyObject* texts = nullptr;  // what os.environ reads; None where that is not to be had
  PyObject* names = nullptr;
  PyObject* read_flags = nullptr;
  int64_t refused = 0, pdl = 0;  // flags that the long way serves, and the one enable_pdl clears
  static constexpr int kNames = 3;
  PyObject* known[kNames] = {};
  int64_t flags = -1;

  bool bind(PyObject* named) {
    texts = keep(named, "texts");
    names = keep(named, "names");
    read_flags = keep(named, "read_flags");
    const Owned refused_bits(keep(named, "refused")), pdl_bit(keep(named, "pdl"));
    if (!texts || !names || !read_flags || !refused_bits || !pdl_bit) return false;
    if (!(texts == Py_None || PyDict_CheckExact(texts)) || !PyTuple_CheckExact(names) ||
        PyTuple_GET_SIZE(names) != kNames) {
      PyErr_SetString(PyExc_TypeError, "bind: expected a dict or None as texts, three names");
      return false;
    }
    refused = PyLong_AsLongLong(refused_bits.get());
    pdl = PyLong_AsLongLong(pdl_bit.get());
    return !PyErr_Occurred();
  }

  // Returns -1 with an exception set when a text is nonsense.
  int64_t read() {
    PyObject* now[kNames] = {};
    bool same = flags >= 0 && texts != Py_None;
    if (texts != Py_None) {
      for (int i = 0; i < kNames; ++i) {
        now[i] = PyDict_GetItemWithError(texts, PyTuple_GET_ITEM(names, i));
        if (now[i] == nullptr && PyErr_Occurred()) return -1;
        same = same && now[i] == known[i];
      }
    }
    if (same) return flags;
    for (PyObject* text : now) Py_XINCREF(text);  // Python code may run from here on
    Owned number(PyObject_CallNoArgs(read_flags));
    const int64_t parsed = number ? PyLong_AsLongLong(number.get()) : -1;
    flags = parsed;
    for (int i = 0; i < kNames; ++i) Py_XSETREF(known[i], now[i]);
    return parsed;
  }
};

}  // namespace
