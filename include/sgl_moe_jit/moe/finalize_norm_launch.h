// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_launch.h: the CUDA finalize with residual add and RMSNorm, between its launcher
// and its binding.
#pragma once

#include <cuda_runtime_api.h>

#include "sgl_moe_jit/moe/finalize_norm_params.h"

namespace sgl_moe_jit {
namespace moe {

// Launches on stream with the current device. num_tokens must be at least 1. allow_vector = false
// takes the scalar path, which has the same bits. Returns the launch's own status.
cudaError_t launch_finalize_norm(const FinalizeNormParams& params, bool enable_pdl,
                                 bool allow_vector, cudaStream_t stream);

}  // namespace moe
}  // namespace sgl_moe_jit
