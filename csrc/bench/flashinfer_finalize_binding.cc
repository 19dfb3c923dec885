// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/flashinfer_finalize_binding.cc: the TVM-FFI door of flashinfer's finalize.
#include <tvm/ffi/function.h>

#include "bench/flashinfer_finalize_launch.h"
#include "sgl_moe_jit/host/cuda_call.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace bench = sgl_moe_jit::bench;
using host::DType;
using host::TensorView;

void check(const char* name, const TensorView& x, DType dtype) {
  host::check_is_cuda(name, x);
  SMJ_CHECK_TYPE(host::dtype_of(x.dtype()) == dtype)
      << name << ": unexpected dtype " << host::dtype_name(x.dtype());
  SMJ_CHECK_VALUE(x.ndim() == 2) << name << ": expected 2 dimensions, got " << host::shape_text(x);
  host::check_contiguous(name, x);
}

void finalize(TensorView out, TensorView gemm2_out, TensorView row_of, TensorView expert_weights) {
  check("out", out, DType::kBFloat16);
  check("gemm2_out", gemm2_out, DType::kBFloat16);
  check("row_of", row_of, DType::kInt32);
  check("expert_weights", expert_weights, DType::kFloat32);
  bench::FlashinferFinalizeParams p;
  p.out = out.data_ptr();
  p.gemm2_out = gemm2_out.data_ptr();
  p.row_of = static_cast<int32_t*>(row_of.data_ptr());
  p.expert_weights = expert_weights.data_ptr();
  p.num_tokens = static_cast<int>(out.size(0));
  p.hidden_dim = static_cast<int>(out.size(1));
  p.padded_hidden_dim = static_cast<int>(gemm2_out.size(1));
  p.top_k = static_cast<int>(row_of.size(1));
  SMJ_CHECK_VALUE(row_of.size(0) == p.num_tokens && expert_weights.size(0) == p.num_tokens &&
                  expert_weights.size(1) == p.top_k && p.hidden_dim <= p.padded_hidden_dim)
      << "out, row_of, expert_weights: shapes disagree";
  host::DeviceGuard guard(out.device().device_id);
  bench::launch_flashinfer_finalize(p, host::current_stream(out.device()));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(finalize, finalize);
