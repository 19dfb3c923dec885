// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation_cpu.cc: silu_and_mul on a CPU, and its TVM-FFI door.
//
// One body compiled for several instruction sets and chosen at run time, as in
// moe/finalize_cpu.cc.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/host/parallel_for.h"
#include "sgl_moe_jit/moe/activation_checks.h"
#include "sgl_moe_jit/moe/activation_math.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::TensorView;

template <typename T>
struct Rows {
  static SMJ_INLINE void run(const moe::ActivationParams* p, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(p->x) + row * p->x_stride;
      const T* up = gate + p->width;
      T* out = static_cast<T*>(p->out) + row * p->width;
      for (int64_t i = 0; i < p->width; ++i) {
        host::store(out + i,
                    moe::math::silu_and_mul(host::to_float(gate[i]), host::to_float(up[i])));
      }
    }
  }
};

template <typename T>
void run(const moe::ActivationParams& p, host::CpuIsa isa, const host::Workers& workers) {
  const int64_t bytes = 3 * static_cast<int64_t>(sizeof(T)) * p.width;
  host::parallel_for(p.num_rows, bytes, workers, [&](int64_t begin, int64_t end) {
    host::run_for_isa<Rows<T>>(isa, &p, begin, end);
  });
}

// Before there is an output.
void check(TensorView x) {
  SMJ_CHECK_VALUE(x.device().device_type == kDLCPU)
      << "x: expected a CPU tensor, got device " << host::device_text(x.device());
  moe::check_activation_input(x);
}

// isa: -1 takes the best; a larger one than the machine has is refused.
void silu_and_mul(TensorView out, TensorView x, int64_t isa, int64_t threads, int64_t openmp) {
  const moe::ActivationParams params = moe::check_activation_call(out, x);
  if (params.num_rows == 0 || params.width == 0) return;
  host::CpuIsa chosen;
  SMJ_CHECK_VALUE(host::resolve_cpu_isa(isa, &chosen))
      << "SGL_MOE_JIT_CPU_ISA: this CPU lacks the instructions asked for";
  const host::Workers workers(threads, openmp);
  switch (host::dtype_of(x.dtype())) {
    case DType::kBFloat16:
      return run<host::BFloat16>(params, chosen, workers);
    case DType::kFloat16:
      return run<host::Float16>(params, chosen, workers);
    default:
      return run<float>(params, chosen, workers);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
