// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_cpu_binding.cc: the TVM-FFI door of the CPU finalize with residual add and
// RMSNorm.
#include <tvm/ffi/function.h>

#include "finalize_cpu_checks.h"
#include "finalize_norm_cpu.h"
#include "sgl_moe_jit/moe/finalize_norm_checks.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void moe_finalize_norm(TensorView out, TensorView residual_out, Optional<TensorView> scale,
                       TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
                       Optional<TensorView> shared, Optional<TensorView> gate_logits,
                       TensorView residual, TensorView weight, int64_t top_k, double routed_factor,
                       double eps, int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeNormCall call = moe::check_finalize_norm(
      {out, residual_out, scale}, {gemm2_out, row_of, weights, shared, gate_logits},
      {residual, weight}, top_k, routed_factor, eps);
  if (call.params.sum.num_tokens == 0) return;
  moe::check_indices(call.params.sum);
  moe::finalize_norm_cpu(call.params, moe::float_type(call.activation),
                         moe::float_type(call.expert_weight), moe::resolve_isa(isa),
                         host::Workers(threads, openmp));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_norm, moe_finalize_norm);
