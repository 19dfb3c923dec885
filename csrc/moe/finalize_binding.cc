// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_binding.cc: the TVM-FFI door of the CUDA finalize: validate, guard, stream, launch.
//
// The build passes SMJ_ACTIVATION_DTYPE and SMJ_WEIGHT_DTYPE, members of host::DType.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/finalize_checks.h"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::TensorView;

void moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of, TensorView weights,
                  host::Optional<TensorView> shared, int64_t top_k, double routed_factor,
                  bool enable_pdl, bool allow_vector) {
  host::check_is_cuda("gemm2_out", gemm2_out);
  const moe::FinalizeCall call =
      moe::check_finalize(out, gemm2_out, row_of, weights, shared, top_k, routed_factor);
  TVM_FFI_ICHECK(call.activation == DType::SMJ_ACTIVATION_DTYPE &&
                 call.weight == DType::SMJ_WEIGHT_DTYPE)
      << "this module was built for other dtypes";
  TVM_FFI_ICHECK(SMJ_TOP_K == 0 || SMJ_TOP_K == top_k) << "this module was built for another top_k";
  if (call.params.num_tokens == 0) return;
  host::DeviceGuard guard(gemm2_out.device().device_id);
  host::check_cuda(moe::launch_finalize(call.params, enable_pdl, allow_vector,
                                        host::current_stream(gemm2_out.device())),
                   "moe_finalize_fuse_shared");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
