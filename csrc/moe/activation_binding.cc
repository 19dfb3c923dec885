// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation_binding.cc: the TVM-FFI door of the CUDA silu_and_mul.
//
// The build passes SMJ_ACTIVATION_DTYPE, a member of host::DType.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/activation_checks.h"
#include "sgl_moe_jit/moe/activation_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

void silu_and_mul(TensorView out, TensorView x, bool enable_pdl, bool allow_vector) {
  host::check_is_cuda("x", x);
  const moe::ActivationParams params = moe::check_activation_call(out, x);
  TVM_FFI_ICHECK(host::dtype_of(x.dtype()) == host::DType::SMJ_ACTIVATION_DTYPE)
      << "this module was built for another dtype";
  if (params.num_rows == 0 || params.width == 0) return;
  host::DeviceGuard guard(x.device().device_id);
  host::check_cuda(
      moe::launch_silu_and_mul(params, enable_pdl, allow_vector, host::current_stream(x.device())),
      "silu_and_mul");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_and_mul, silu_and_mul);
