// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_python.h: Python references, and calls of Python's C functions without Python's call.
//
// `torch.is_grad_enabled` is a C function behind an object that takes no arguments, and
// `Tensor.requires_grad` one behind a descriptor: reached directly, each costs a fifth of what
// Python's own call protocol does. What is not of that shape is called as Python would.
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

// A method without arguments or an attribute, of objects whose type has that descriptor.
class OfTensor {
 public:
  // Keeps the reference for ever; false when there is none.
  bool set(PyObject* descriptor) {
    if (descriptor == nullptr) return false;
    descriptor_ = descriptor;
    if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type)) {
      const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
      if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
    } else if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
      getter_ = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
    }
    return true;
  }
  int truth(PyObject* x) const {
    if (method_) return truth_of(method_(x, nullptr));
    if (getter_) return truth_of(getter_->get(x, getter_->closure));
    return truth_of(PyObject_CallOneArg(descriptor_, x));
  }

 private:
  PyObject* descriptor_ = nullptr;
  PyCFunction method_ = nullptr;
  const PyGetSetDef* getter_ = nullptr;
};

}  // namespace
