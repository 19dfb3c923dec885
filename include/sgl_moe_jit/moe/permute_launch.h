// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_launch.h: the CUDA permute, between its launcher and its binding.
#pragma once

#include <cuda_runtime_api.h>

#include "sgl_moe_jit/moe/permute_params.h"

namespace sgl_moe_jit {
namespace moe {

// Launches on stream with the current device, also for zero tokens (the offsets are written).
// kOneLaunch needs slots, experts and top_k within the kOneLaunchMax constants; kFourLaunches needs
// scratch and counts; kTwoLaunches needs counts when the alignment is not 1.
// allow_vector = false copies item by item, which has the same bits. Returns the first launch
// status that is not success.
cudaError_t launch_permute(const PermuteParams& params, PermutePath path, bool enable_pdl,
                           bool allow_vector, cudaStream_t stream);

}  // namespace moe
}  // namespace sgl_moe_jit
