// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_python.h: Python references, and calls of Python's C functions without Python's call.
//
// Behind an object such as `torch._C._len_torch_function_stack` is a C function without arguments.
// Called directly it costs a fifth of what Python's own call protocol does. What is not of that
// shape is called as Python would.
#pragma once

#include <Python.h>

#include <utility>

namespace {

// A reference that is given back at the end of its scope.
class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* object) : object_(object) {}
  static Owned borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Owned(object);
  }
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// 1, 0, or -1 with an exception set. Takes the reference.
inline int truth_of(PyObject* object) {
  if (object == Py_True || object == Py_False) {
    const int result = object == Py_True;
    Py_DECREF(object);
    return result;
  }
  if (object == nullptr) return -1;
  const int result = PyObject_IsTrue(object);
  Py_DECREF(object);
  return result;
}

// A callable without arguments, for the truth of what it returns.
class NoArguments {
 public:
  // Keeps the reference for ever; false when there is none.
  bool set(PyObject* callable) {
    if (callable == nullptr) return false;
    callable_ = callable;
    if (PyCFunction_CheckExact(callable) && PyCFunction_GetFlags(callable) == METH_NOARGS) {
      function_ = PyCFunction_GetFunction(callable);
      self_ = PyCFunction_GetSelf(callable);
    }
    return true;
  }
  int truth() const {
    return truth_of(function_ ? function_(self_, nullptr) : PyObject_CallNoArgs(callable_));
  }

 private:
  PyObject *callable_ = nullptr, *self_ = nullptr;
  PyCFunction function_ = nullptr;
};

}  // namespace
