// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_call.cc: a Python extension: an op's eager call from Python's arguments to a kernel.
//
// QuickCall does in C what a quick way written in Python would: is every argument of exactly its
// kind, does nothing trace, want a gradient or a negation? Then it hands the tensors to the module
// that served last, as DLPack views that live on the stack. Whatever does not fit, and every error,
// gives None: nothing was written, and the caller takes the long way, which has words for it.
#define PY_SSIZE_T_CLEAN
#include "sgl_moe_jit/host/quick_call.h"

#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>

#include "quick_python.h"
#include "quick_serve.h"
#include "quick_torch.h"

namespace {

PyObject* quick_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  const Quick& self = *reinterpret_cast<Quick*>(object);
  if (PyVectorcall_NARGS(nargsf) != self.count || (names && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_Format(PyExc_TypeError, "QuickCall: expected %d positional arguments", self.count);
    return nullptr;
  }
  bool final = false;
  PyObject* result = nullptr;
  try {
    result = serve(self, args, &final);
  } catch (...) {  // of torch's: such a tensor is not for kernels
  }
  if (result != nullptr || final) return result;
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // such as an interrupt
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

PyObject* quick_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* kinds = nullptr;
  PyObject* tables = nullptr;
  int key = 0, second = -1;
  if (!PyArg_ParseTuple(args, "sO!ii", &kinds, &PyTuple_Type, &tables, &key, &second)) {
    return nullptr;
  }
  const int count = static_cast<int>(std::strlen(kinds));
  int outputs = 0;
  for (const char* k = kinds; *k != 0; ++k) outputs += *k == kOutput;
  bool right = torch.tensor != nullptr && count <= kMaxQuickValues && kinds[0] == kTensor &&
               std::strspn(kinds, "TxtoiIfnp") == static_cast<size_t>(count) && outputs >= 1 &&
               outputs <= kMaxQuickMade && key > 0 && key < count && kinds[key] == kInt &&
               second < count && PyTuple_GET_SIZE(tables) == 3;
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(tables); ++i) {
    right = PyDict_CheckExact(PyTuple_GET_ITEM(tables, i));
  }
  if (!right) {
    PyErr_SetString(PyExc_ValueError, "QuickCall: the description fits no op, or bind is missing");
    return nullptr;
  }
  Quick* self = reinterpret_cast<Quick*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  Py_INCREF(tables);
  self->call = quick_call;
  self->tables = tables;
  self->count = count;
  self->outputs = outputs;
  self->key = key;
  self->second = second;
  std::strcpy(self->kinds, kinds);
  self->optional = self->differentiable = 0;
  for (int i = 0; i < count; ++i) {
    self->optional |= uint32_t{is_optional(kinds[i])} << i;
    self->differentiable |= uint32_t{takes_gradient(kinds[i])} << i;
  }
  return reinterpret_cast<PyObject*>(self);
}

int quick_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<Quick*>(object)->tables);
  return 0;
}

void quick_dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  Py_XDECREF(reinterpret_cast<Quick*>(object)->tables);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMemberDef quick_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Quick, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot quick_slots[] = {{Py_tp_new, reinterpret_cast<void*>(quick_new)},
                             {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                             {Py_tp_members, quick_members},
                             {Py_tp_traverse, reinterpret_cast<void*>(quick_traverse)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(quick_dealloc)},
                             {0, nullptr}};
PyType_Spec quick_spec = {"sgl_moe_jit.QuickCall", sizeof(Quick), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                          quick_slots};

PyObject* bind(PyObject*, PyObject* args, PyObject* named) {
  if (torch.tensor != nullptr) Py_RETURN_NONE;  // by an earlier load of this library
  if (named == nullptr || PyTuple_GET_SIZE(args) != 0) {
    PyErr_SetString(PyExc_TypeError, "bind: expected keywords");
    return nullptr;
  }
  if (!environment.bind(named) || !torch.bind(named)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"bind", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bind)),
     METH_VARARGS | METH_KEYWORDS, "Take torch's and the environment's objects by name, once."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "sgl_moe_jit_quick_call",
                      "Eager calls from Python's arguments to a kernel.",
                      -1,
                      functions,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_sgl_moe_jit_quick_call() {
  Owned made(PyModule_Create(&module));
  if (!made) return nullptr;
  Owned type(PyType_FromSpec(&quick_spec));
  if (!type || PyModule_AddObjectRef(made.get(), "QuickCall", type.get()) != 0) return nullptr;
  return made.release();
}
