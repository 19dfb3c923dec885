// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/quick_call.h: what the Python extension hands to a kernel's module, and what it gets back.
//
// Two libraries, built apart, agree on this: plain C data and DLPack, no Python, no TVM-FFI. A
// change here changes both, as their cache keys hold this file's contents.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

namespace sgl_moe_jit {
namespace host {

constexpr int kMaxQuickValues = 24;  // parameters of one op
constexpr int kMaxQuickMade = 4;     // outputs of one op

// One argument, by the kind its parameter has.
union QuickValue {
  const DLTensor* tensor;  // nullptr for None
  int64_t integer;
  double real;
};

struct QuickCall {
  const QuickValue* values;  // one a parameter, in order
  uint64_t given;            // bit i: argument i is not None
  int64_t flags;             // of env.launch_flags
  void* stream;              // torch's current one on the device of the first tensor
  long long cpu[3];          // on a CPU: instruction set, threads, OpenMP's entry point
  DLPackManagedTensorAllocator allocate;
  // The outputs that were not given, by their number among the outputs. The caller owns what it
  // finds here, whatever the answer.
  DLManagedTensorVersioned* made[kMaxQuickMade];

  bool has(int i) const { return (given >> i & 1) != 0; }
};

// Whether the call was served. Otherwise nothing was written or launched, for whatever reason, and
// the caller repeats the call by the way that names it.
using QuickFunction = bool (*)(QuickCall*) noexcept;

}  // namespace host
}  // namespace sgl_moe_jit
