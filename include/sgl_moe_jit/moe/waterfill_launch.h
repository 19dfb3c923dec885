// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_launch.h: the CUDA waterfill, between its launcher and its binding.
#pragma once

#include <cuda_runtime_api.h>

#include "sgl_moe_jit/moe/waterfill_params.h"

namespace sgl_moe_jit {
namespace moe {

// Launches on stream with the current device. Without chunk_counts one block, which has room for
// kOneBlockRows and kOneBlockIds (kChunkRows in kRestricted); with them and plan three kernels.
// Returns the first launch status that is no success.
cudaError_t launch_waterfill(const WaterfillParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace moe
}  // namespace sgl_moe_jit
