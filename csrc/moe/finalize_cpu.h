// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu.h: the CPU finalize, between its kernel and its binding.
#pragma once

#include "sgl_moe_jit/moe/finalize_params.h"

namespace sgl_moe_jit {
namespace moe {

enum class CpuIsa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set this machine has.
CpuIsa best_cpu_isa();

// Runs on up to num_threads threads; isa must not exceed best_cpu_isa(). Same bits for every isa
// and thread count.
void finalize_cpu(const FinalizeParams& params, bool activation_is_bf16, bool weight_is_bf16,
                  CpuIsa isa, int num_threads);

}  // namespace moe
}  // namespace sgl_moe_jit
