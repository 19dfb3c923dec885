// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// test_activation_sigmoid.h: math::sigmoid of every element, on each instruction set of this CPU.
#pragma once

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/moe/activation_math.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sigmoid_test {

struct Body {
  static SMJ_INLINE void run(float* out, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = sgl_moe_jit::moe::math::sigmoid(x[i]);
  }
};

// False: this CPU lacks the instruction set.
inline bool sigmoid(sgl_moe_jit::host::TensorView out, sgl_moe_jit::host::TensorView x,
                    int64_t isa) {
  namespace host = sgl_moe_jit::host;
  host::CpuIsa chosen;
  if (!host::resolve_cpu_isa(isa, &chosen)) return false;
  host::run_for_isa<Body>(chosen, static_cast<float*>(out.data_ptr()),
                          static_cast<const float*>(x.data_ptr()), x.numel());
  return true;
}

}  // namespace sigmoid_test
