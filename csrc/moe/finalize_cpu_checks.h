// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu_checks.h: what the CPU bindings check beside moe/finalize_checks.h.
#pragma once

#include "finalize_sum_cpu.h"
#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/moe/finalize_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

inline void check_is_cpu(const host::TensorView& gemm2_out) {
  SMJ_CHECK_VALUE(gemm2_out.device().device_type == kDLCPU)
      << "gemm2_out: expected a CPU tensor, got device " << host::device_text(gemm2_out.device());
}

// Every index, before anything is written.
inline void check_indices(const FinalizeParams& p) {
  for (int64_t i = 0; i < p.num_tokens * p.top_k; ++i) {
    SMJ_CHECK_VALUE(p.row_of[i] < p.num_rows)
        << "expanded_idx_to_permuted_idx: expected indices below " << p.num_rows
        << " (the rows of gemm2_out), got " << p.row_of[i] << " for token " << i / p.top_k << ", k "
        << i % p.top_k;
  }
}

// isa: -1 takes the best; a larger one than the machine has is refused.
inline host::CpuIsa resolve_isa(int64_t isa) {
  host::CpuIsa chosen;
  SMJ_CHECK_VALUE(host::resolve_cpu_isa(isa, &chosen))
      << "SGL_MOE_JIT_CPU_ISA: this CPU lacks the instructions asked for";
  return chosen;
}

// Of a dtype that finalize_checks.h has let through.
inline FloatType float_type(host::DType dtype) {
  switch (dtype) {
    case host::DType::kBFloat16:
      return FloatType::kBFloat16;
    case host::DType::kFloat16:
      return FloatType::kFloat16;
    default:
      return FloatType::kFloat32;  // kNone too: there are no weights to read
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
