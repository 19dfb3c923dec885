// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu_binding.cc: the TVM-FFI door of the CPU finalize.
#include <tvm/ffi/function.h>

#include "finalize_cpu.h"
#include "sgl_moe_jit/moe/finalize_checks.h"

namespace {

using sgl_moe_jit::host::DType;
using sgl_moe_jit::host::Optional;
using sgl_moe_jit::host::TensorView;
namespace moe = sgl_moe_jit::moe;

// isa: -1 takes the best; a larger one than the machine has is refused.
void moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of, TensorView weights,
                  Optional<TensorView> shared, int64_t top_k, double routed_factor, int64_t isa,
                  int64_t threads, int64_t openmp) {
  SMJ_CHECK_VALUE(gemm2_out.device().device_type == kDLCPU)
      << "gemm2_out: expected a CPU tensor, got device "
      << sgl_moe_jit::host::device_text(gemm2_out.device());
  const moe::FinalizeCall call =
      moe::check_finalize(out, gemm2_out, row_of, weights, shared, top_k, routed_factor);
  const moe::FinalizeParams& p = call.params;
  if (p.num_tokens == 0) return;
  for (int64_t i = 0; i < p.num_tokens * p.top_k; ++i) {
    SMJ_CHECK_VALUE(p.row_of[i] < p.num_rows)
        << "expanded_idx_to_permuted_idx: expected indices below " << p.num_rows
        << " (the rows of gemm2_out), got " << p.row_of[i] << " for token " << i / p.top_k << ", k "
        << i % p.top_k;
  }
  sgl_moe_jit::host::CpuIsa chosen;
  SMJ_CHECK_VALUE(sgl_moe_jit::host::resolve_cpu_isa(isa, &chosen))
      << "SGL_MOE_JIT_CPU_ISA: this CPU lacks the instructions asked for";
  moe::finalize_cpu(p, call.activation == DType::kBFloat16, call.weight == DType::kBFloat16, chosen,
                    sgl_moe_jit::host::Workers(threads, openmp));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
