// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_cpu.h: the CPU finalize with residual add and RMSNorm, between its kernel and
// its binding.
#pragma once

#include "finalize_sum_cpu.h"
#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/host/parallel_for.h"
#include "sgl_moe_jit/moe/finalize_norm_params.h"

namespace sgl_moe_jit {
namespace moe {

// weight is the expert weights' type; it counts only where params has them. isa must not exceed
// host::best_cpu_isa(). Same bits for every isa and thread count.
void finalize_norm_cpu(const FinalizeNormParams& params, FloatType activation, FloatType weight,
                       host::CpuIsa isa, const host::Workers& workers);

}  // namespace moe
}  // namespace sgl_moe_jit
