// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_binding.cc: the TVM-FFI door of the CUDA finalize with residual add and
// RMSNorm: validate, guard, stream, launch.
//
// The build passes SMJ_ACTIVATION_DTYPE, a member of host::DType, SMJ_TOP_K and
// SMJ_FP8.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/finalize_norm_checks.h"
#include "sgl_moe_jit/moe/finalize_norm_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::Optional;
using host::TensorView;

void moe_finalize_norm(TensorView out, TensorView residual_out, Optional<TensorView> scale,
                       TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
                       Optional<TensorView> shared, Optional<TensorView> gate_logits,
                       TensorView residual, TensorView weight, int64_t top_k, double routed_factor,
                       double eps, bool enable_pdl, bool allow_vector) {
  host::check_is_cuda("gemm2_out", gemm2_out);
  const moe::FinalizeNormCall call = moe::check_finalize_norm(
      {out, residual_out, scale}, {gemm2_out, row_of, weights, shared, gate_logits},
      {residual, weight}, top_k, routed_factor, eps);
  TVM_FFI_ICHECK(call.activation == DType::SMJ_ACTIVATION_DTYPE)
      << "this module was built for another dtype";
  TVM_FFI_ICHECK((SMJ_TOP_K == 0 || SMJ_TOP_K == top_k) && scale.has_value() == SMJ_FP8)
      << "this module was built for another call";
  if (call.params.sum.num_tokens == 0) return;
  host::DeviceGuard guard(gemm2_out.device().device_id);
  host::check_cuda(moe::launch_finalize_norm(call.params, enable_pdl, allow_vector,
                                             host::current_stream(gemm2_out.device())),
                   "moe_finalize_fuse_shared_add_rmsnorm");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_norm, moe_finalize_norm);
