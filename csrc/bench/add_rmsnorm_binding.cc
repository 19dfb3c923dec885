// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/add_rmsnorm_binding.cc: the TVM-FFI door of either add-RMSNorm.
#include <tvm/ffi/function.h>

#include "bench/add_rmsnorm_launch.h"
#include "sgl_moe_jit/host/cuda_call.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace bench = sgl_moe_jit::bench;
using host::TensorView;

void check(const char* name, const TensorView& x) {
  host::check_is_cuda(name, x);
  SMJ_CHECK_TYPE(host::dtype_of(x.dtype()) == host::DType::kBFloat16)
      << name << ": expected bfloat16, got " << host::dtype_name(x.dtype());
  host::check_contiguous(name, x);
  SMJ_CHECK_VALUE(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0)
      << name << ": expected an address that is a multiple of 16 bytes";
}

void add_rmsnorm(TensorView x, TensorView residual, TensorView weight, double eps) {
  check("x", x);
  check("residual", residual);
  check("weight", weight);
  SMJ_CHECK_VALUE(x.ndim() == 2 && x.size(0) > 0 && x.size(1) % 8 == 0)
      << "x: expected [num_tokens, hidden_dim], hidden_dim a multiple of 8, got "
      << host::shape_text(x);
  SMJ_CHECK_VALUE(residual.ndim() == 2 && residual.size(0) == x.size(0) &&
                  residual.size(1) == x.size(1))
      << "residual: expected " << host::shape_text(x) << ", got " << host::shape_text(residual);
  SMJ_CHECK_VALUE(weight.numel() == x.size(1))
      << "weight: expected " << x.size(1) << " values, got " << host::shape_text(weight);
  bench::AddRmsnormParams p;
  p.x = x.data_ptr();
  p.residual = residual.data_ptr();
  p.weight = weight.data_ptr();
  p.num_tokens = static_cast<int>(x.size(0));
  p.hidden_dim = static_cast<int>(x.size(1));
  p.eps = static_cast<float>(eps);
  host::DeviceGuard guard(x.device().device_id);
  host::check_cuda(bench::launch_add_rmsnorm(p, host::current_stream(x.device())), "add_rmsnorm");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_rmsnorm, add_rmsnorm);
