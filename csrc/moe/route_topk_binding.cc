// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_binding.cc: the TVM-FFI door of the routing kernel.
//
// The build passes SMJ_LOGIT_DTYPE, a member of host::DType.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/route_topk_checks.h"
#include "sgl_moe_jit/moe/route_topk_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void route_topk(TensorView weights, TensorView ids, TensorView logits, Optional<TensorView> bias,
                Optional<TensorView> scale, Optional<TensorView> num_valid, int64_t valid_rows,
                int64_t score_function, int64_t flags, int64_t n_group, int64_t topk_group,
                double epsilon, double factor, bool enable_pdl) {
  host::check_is_cuda("logits", logits);
  const moe::RouteParams params =
      moe::check_route_topk(weights, ids, logits, bias, scale, num_valid, valid_rows,
                            {score_function, flags, n_group, topk_group, epsilon, factor});
  TVM_FFI_ICHECK(host::dtype_of(logits.dtype()) == host::DType::SMJ_LOGIT_DTYPE)
      << "this module was built for another dtype";
  if (params.num_tokens == 0) return;
  host::DeviceGuard guard(logits.device().device_id);
  host::check_cuda(
      moe::launch_route_topk(params, enable_pdl, host::current_stream(logits.device())),
      "route_topk");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(route_topk, route_topk);
