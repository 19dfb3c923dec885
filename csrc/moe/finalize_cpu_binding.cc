// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu_binding.cc: the TVM-FFI door of the CPU finalize.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "finalize_cpu.h"
#include "finalize_cpu_checks.h"
#include "sgl_moe_jit/moe/finalize_checks.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void run(const moe::FinalizeCall& call, int64_t isa, int64_t threads, int64_t openmp) {
  if (call.params.num_tokens == 0) return;
  moe::finalize_cpu(call.params, moe::float_type(call.activation), moe::float_type(call.weight),
                    moe::resolve_isa(isa), host::Workers(threads, openmp));
}

void moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of,
                  Optional<TensorView> weights, Optional<TensorView> shared,
                  Optional<TensorView> gate_logits, int64_t top_k, double routed_factor,
                  int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  const moe::FinalizeCall call = moe::check_finalize(out, in, top_k, routed_factor);
  moe::check_indices(call.params);
  run(call, isa, threads, openmp);
}

// The same into a tensor of its own from the caller's allocator, which nothing reaches before the
// arguments are found right.
host::Tensor moe_finalize_new(TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
                              Optional<TensorView> shared, Optional<TensorView> gate_logits,
                              int64_t top_k, double routed_factor, Optional<int64_t> hidden_dim,
                              int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  moe::FinalizeCall call = moe::check_finalize_inputs(in, moe::output_width(in, hidden_dim),
                                                      moe::width_name(in), top_k, routed_factor);
  moe::check_indices(call.params);
  moe::FinalizeParams& p = call.params;
  host::Tensor out = host::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {p.num_tokens, p.hidden_dim},
                                                gemm2_out.dtype(), gemm2_out.device());
  p.out = out.data_ptr();
  p.out_stride = p.hidden_dim;
  run(call, isa, threads, openmp);
  return out;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_new, moe_finalize_new);
