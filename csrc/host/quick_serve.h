// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_serve.h: one call, from Python's arguments to the kernel's module and back.
#pragma once

#include <Python.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <utility>

#include "quick_python.h"
#include "quick_tensor.h"
#include "quick_torch.h"
#include "sgl_moe_jit/host/quick_call.h"

namespace {

using namespace sgl_moe_jit::host;

Torch torch;
Environment environment;

// A parameter's kind, as the letters that Python passes.
enum Kind : char {
  kTensor = 'T',
  kIntTensor = 'x',  // of a dtype that takes no gradient
  kOptionalTensor = 't',
  kOutput = 'o',  // optional; made when None
  kInt = 'i',
  kOptionalInt = 'I',
  kFloat = 'f',
  kNumber = 'n',  // a float, or an int to be one
  kPdl = 'p'      // None, True or False; goes into the flags
};

struct Quick {
  PyObject ob_base;
  vectorcallfunc call;
  // Three dicts, of which only the last is for a CPU: from the key argument to a tuple that ends in
  // a module's address.
  PyObject* tables;
  int count, outputs;
  uint32_t optional, differentiable;  // by parameter, a bit each
  int key;                            // the int argument that the tables are keyed by
  int second;  // the argument that asks for the second table when given, or -1
  char kinds[kMaxQuickValues + 1];
};

bool is_optional(char kind) { return std::strchr("toIp", kind) != nullptr; }
bool takes_gradient(char kind) { return std::strchr("Tto", kind) != nullptr; }

bool is_kind(char kind, PyObject* x) {
  switch (kind) {
    case kInt:
    case kOptionalInt:
      return PyLong_CheckExact(x);
    case kFloat:
      return PyFloat_CheckExact(x);
    case kNumber:
      return PyFloat_CheckExact(x) || PyLong_CheckExact(x);
    case kPdl:
      return PyBool_Check(x);
    default:
      return torch.is_tensor(x);
  }
}

bool are_kinds(const Quick& self, PyObject* const* args) {
  for (int i = 0; i < self.count; ++i) {
    if (args[i] == Py_None ? (self.optional >> i & 1) == 0 : !is_kind(self.kinds[i], args[i])) {
      return false;
    }
  }
  return true;
}

// Whether autograd would want to know of the call.
bool wants_gradient(const Quick& self, PyObject* const* args) {
  if (!c10::GradMode::is_enabled()) return false;
  for (int i = 0; i < self.count; ++i) {
    if ((self.differentiable >> i & 1) != 0 && args[i] != Py_None &&
        torch.tensors.of(args[i]).requires_grad()) {
      return true;
    }
  }
  return false;
}

// Fills values and views; false where the long way serves.
bool convert(const Quick& self, PyObject* const* args, QuickCall* call, QuickValue* values,
             DLTensor* views) {
  for (int i = 0; i < self.count; ++i) {
    PyObject* x = args[i];
    values[i].integer = 0;
    if (x == Py_None) continue;
    call->given |= uint64_t{1} << i;
    switch (self.kinds[i]) {
      case kInt:
      case kOptionalInt:
        values[i].integer = PyLong_AsLongLong(x);
        if (values[i].integer == -1 && PyErr_Occurred()) return false;
        break;
      case kFloat:
        values[i].real = PyFloat_AS_DOUBLE(x);
        break;
      case kNumber:
        if (PyFloat_CheckExact(x)) {
          values[i].real = PyFloat_AS_DOUBLE(x);
        } else {
          const long long integer = PyLong_AsLongLong(x);
          if (integer == -1 && PyErr_Occurred()) return false;
          values[i].real = static_cast<double>(integer);
        }
        break;
      case kPdl:
        if (x == Py_False) call->flags &= ~environment.pdl;
        break;
      default:
        c10::TensorImpl& tensor = torch.tensors.of(x);
        if (self.kinds[i] == kOutput && tensor.is_inference() &&
            !c10::InferenceMode::is_enabled()) {
          return false;
        }
        if (!view_of(tensor, &views[i])) return false;
        values[i].tensor = &views[i];
    }
  }
  return true;
}

// The module to ask: an owned reference to the tuple that keeps it loaded.
Owned find_kernel(const Quick& self, PyObject* const* args, bool on_cpu, QuickFunction* function) {
  const bool second = self.second >= 0 && args[self.second] != Py_None;
  PyObject* table = PyTuple_GET_ITEM(self.tables, on_cpu ? 2 : second ? 1 : 0);
  PyObject* kernel = PyDict_GetItemWithError(table, args[self.key]);
  if (kernel == nullptr || !PyTuple_Check(kernel) || PyTuple_GET_SIZE(kernel) == 0) return {};
  void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(kernel, PyTuple_GET_SIZE(kernel) - 1));
  if (address == nullptr) return {};
  *function = reinterpret_cast<QuickFunction>(address);
  return Owned::borrowed(kernel);
}

// What a module for the tensors' device needs beside the arguments.
bool prepare(DLDevice device, QuickCall* call) {
  call->allocate = torch.dlpack->managed_tensor_allocator;
  if (device.device_type != kDLCPU) {
    return torch.dlpack->current_work_stream(device.device_type, device.device_id, &call->stream) ==
           0;
  }
  const Owned settings(PyObject_CallNoArgs(torch.cpu_settings));
  return settings &&
         PyArg_ParseTuple(settings.get(), "LLL", &call->cpu[0], &call->cpu[1], &call->cpu[2]) != 0;
}

// The given outputs, and Python's tensors for those that were made; their tuple where there are
// several.
PyObject* results_of(const Quick& self, PyObject* const* args, QuickCall* call) {
  Owned all(self.outputs > 1 ? PyTuple_New(self.outputs) : nullptr);
  if (self.outputs > 1 && !all) return nullptr;
  int number = 0;
  for (int i = 0; i < self.count; ++i) {
    if (self.kinds[i] != kOutput) continue;
    Owned one = Owned::borrowed(args[i]);
    if (args[i] != Py_None) {
      c10::TensorImpl& written = torch.tensors.of(args[i]);
      if (!written.is_inference()) written.bump_version();  // an inference tensor has none
    } else {
      if (call->made[number] == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "the kernel's module made no output");
        return nullptr;
      }
      one = Owned(torch.wrap(std::exchange(call->made[number], nullptr)));
      if (!one) return nullptr;
    }
    if (self.outputs == 1) return one.release();
    PyTuple_SET_ITEM(all.get(), number++, one.release());
  }
  return all.release();
}

// A new reference; or nullptr where the long way serves, with or without an exception that it
// repeats; or nullptr and *final, with an exception that stands.
PyObject* serve(const Quick& self, PyObject* const* args, bool* final) {
  if (!are_kinds(self, args) || !torch.is_plain_moment() || wants_gradient(self, args))
    return nullptr;
  QuickCall call{};
  call.flags = environment.read();  // below 0: nonsense; the long way tells if it matters
  if (call.flags < 0 || (call.flags & environment.refused) != 0) return nullptr;
  QuickValue values[kMaxQuickValues];
  DLTensor views[kMaxQuickValues];
  call.values = values;
  if (!convert(self, args, &call, values, views)) return nullptr;
  const DLDevice device = views[0].device;  // the first parameter is a tensor
  QuickFunction function = nullptr;
  const Owned kernel = find_kernel(self, args, device.device_type == kDLCPU, &function);
  if (!kernel || !prepare(device, &call)) return nullptr;
  bool served = false;
  // As torch does around its own operations: a launch may wait for the device.
  Py_BEGIN_ALLOW_THREADS;
  served = function(&call);
  Py_END_ALLOW_THREADS;
  // From here on no repetition: a given output may have been an input too.
  *final = served;
  PyObject* result = served ? results_of(self, args, &call) : nullptr;
  for (DLManagedTensorVersioned* left : call.made) {
    if (left != nullptr && left->deleter != nullptr) left->deleter(left);
  }
  return result;
}

}  // namespace
