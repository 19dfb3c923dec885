// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_cpu_binding.cc: the TVM-FFI door of the CPU finalize with residual add and
// RMSNorm.
#include <tvm/ffi/function.h>

#include "finalize_cpu_checks.h"
#include "finalize_norm_cpu.h"
#include "sgl_moe_jit/moe/finalize_norm_quick.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void run(const moe::FinalizeNormCall& call, int64_t isa, int64_t threads, int64_t openmp) {
  if (call.params.sum.num_tokens == 0) return;
  moe::check_indices(call.params.sum);
  moe::finalize_norm_cpu(call.params, moe::float_type(call.activation),
                         moe::float_type(call.expert_weight), moe::resolve_isa(isa),
                         host::Workers(threads, openmp));
}

// Before there are outputs.
void check(TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
           Optional<TensorView> shared, Optional<TensorView> gate_logits, TensorView residual,
           TensorView weight, int64_t top_k, double routed_factor, double eps) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeNormCall call =
      moe::check_norm_inputs({gemm2_out, row_of, weights, shared, gate_logits}, {residual, weight},
                             top_k, routed_factor, eps);
  moe::check_indices(call.params.sum);
}

void moe_finalize_norm(TensorView out, TensorView residual_out, Optional<TensorView> scale,
                       TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
                       Optional<TensorView> shared, Optional<TensorView> gate_logits,
                       TensorView residual, TensorView weight, int64_t top_k, double routed_factor,
                       double eps, int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeNormCall call = moe::check_finalize_norm(
      {out, residual_out, scale}, {gemm2_out, row_of, weights, shared, gate_logits},
      {residual, weight}, top_k, routed_factor, eps);
  run(call, isa, threads, openmp);
}

template <bool kFp8>
bool quick_finalize_norm(host::QuickCall* quick) noexcept {
  return host::quick_answer([quick] {
    const moe::QuickFinalizeNorm<kFp8> x(quick);
    moe::check_is_cpu(x.gemm2_out);
    run(x.check(), quick->cpu[0], quick->cpu[1], quick->cpu[2]);
    return true;
  });
}

int64_t quick_address(bool fp8) {
  return host::address_of(fp8 ? quick_finalize_norm<true> : quick_finalize_norm<false>);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_norm, moe_finalize_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_address, quick_address);
