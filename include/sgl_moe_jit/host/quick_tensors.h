// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_tensors.h: a quick call's arguments as bindings take them, and its new outputs.
#pragma once

#include <initializer_list>

#include "sgl_moe_jit/host/quick_call.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace host {

// Argument i; each is of the kind that Python's description of the op says.
inline TensorView quick_tensor(const QuickCall& call, int i) { return call.values[i].tensor; }
inline Optional<TensorView> quick_optional(const QuickCall& call, int i) {
  return call.has(i) ? Optional<TensorView>(quick_tensor(call, i)) : std::nullopt;
}
inline Optional<int64_t> quick_optional_int(const QuickCall& call, int i) {
  return call.has(i) ? Optional<int64_t>(call.values[i].integer) : std::nullopt;
}

// Makes output number i, row-major, with torch's allocator.
inline TensorView quick_make(QuickCall* call, int i, std::initializer_list<int64_t> shape,
                             DLDataType dtype, DLDevice device) {
  DLTensor prototype{};
  prototype.device = device;
  prototype.dtype = dtype;
  prototype.ndim = static_cast<int32_t>(shape.size());
  prototype.shape = const_cast<int64_t*>(shape.begin());
  const auto ignore = [](void*, const char*, const char*) {};  // repeated where it is reported
  const int status = call->allocate(&prototype, &call->made[i], nullptr, ignore);
  TVM_FFI_CHECK(status == 0, RuntimeError) << "no memory for an output";
  return &call->made[i]->dl_tensor;
}

// Runs serve(), which returns whether this module is the one for the call, and takes every
// exception for a no.
template <typename Serve>
bool quick_answer(const Serve& serve) noexcept {
  try {
    return serve();
  } catch (...) {
    return false;
  }
}

// What a module exports for Python to hand to the extension.
inline int64_t address_of(QuickFunction function) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(function));
}

}  // namespace host
}  // namespace sgl_moe_jit
