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
#include "sgl_moe_jit/host/served_devices.h"
#include "sgl_moe_jit/moe/finalize_norm_launch.h"
#include "sgl_moe_jit/moe/finalize_norm_quick.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::Optional;
using host::TensorView;

host::ServedDevices served;

void serve_device(int64_t device, bool supports_pdl) { served.add(device, supports_pdl); }

enum Flags : int64_t { kPdl = 1, kVector = 2 };

void launch(const moe::FinalizeNormCall& call, DLDevice device, int64_t flags,
            cudaStream_t stream) {
  if (call.params.sum.num_tokens == 0) return;
  host::DeviceGuard guard(device.device_id);
  const bool pdl = (flags & kPdl) != 0 && served.has_pdl(device);
  host::check_cuda(moe::launch_finalize_norm(call.params, pdl, (flags & kVector) != 0, stream),
                   "moe_finalize_fuse_shared_add_rmsnorm");
}

void moe_finalize_norm(TensorView out, TensorView residual_out, Optional<TensorView> scale,
                       TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
                       Optional<TensorView> shared, Optional<TensorView> gate_logits,
                       TensorView residual, TensorView weight, int64_t top_k, double routed_factor,
                       double eps, int64_t flags) {
  host::check_is_cuda("gemm2_out", gemm2_out);
  const moe::FinalizeNormCall call = moe::check_finalize_norm(
      {out, residual_out, scale}, {gemm2_out, row_of, weights, shared, gate_logits},
      {residual, weight}, top_k, routed_factor, eps);
  TVM_FFI_ICHECK(call.activation == DType::SMJ_ACTIVATION_DTYPE)
      << "this module was built for another dtype";
  TVM_FFI_ICHECK((SMJ_TOP_K == 0 || SMJ_TOP_K == top_k) && scale.has_value() == SMJ_FP8)
      << "this module was built for another call";
  const DLDevice device = gemm2_out.device();
  launch(call, device, flags, host::current_stream(device));
}

// The same for the extension, where the caller has only guessed the module.
bool quick_finalize_norm(host::QuickCall* quick) noexcept {
  return host::quick_answer([quick] {
    const moe::QuickFinalizeNorm<SMJ_FP8 != 0> x(quick);
    const DLDevice device = x.gemm2_out.device();
    if (host::dtype_of(x.gemm2_out.dtype()) != DType::SMJ_ACTIVATION_DTYPE ||
        !(SMJ_TOP_K == 0 || SMJ_TOP_K == x.top_k) || !served.has(device)) {
      return false;
    }
    launch(x.check(), device, quick->flags, static_cast<cudaStream_t>(quick->stream));
    return true;
  });
}

int64_t quick_address() { return host::address_of(quick_finalize_norm); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_norm, moe_finalize_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(serve_device, serve_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_address, quick_address);
