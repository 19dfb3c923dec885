// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu_binding.cc: the TVM-FFI door of the CPU finalize.
#include <tvm/ffi/function.h>

#include "finalize_cpu.h"
#include "finalize_cpu_checks.h"
#include "sgl_moe_jit/moe/finalize_checks.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of,
                  Optional<TensorView> weights, Optional<TensorView> shared,
                  Optional<TensorView> gate_logits, int64_t top_k, double routed_factor,
                  int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  const moe::FinalizeCall call = moe::check_finalize(out, in, top_k, routed_factor);
  if (call.params.num_tokens == 0) return;
  moe::check_indices(call.params);
  moe::finalize_cpu(call.params, moe::float_type(call.activation), moe::float_type(call.weight),
                    moe::resolve_isa(isa), host::Workers(threads, openmp));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
