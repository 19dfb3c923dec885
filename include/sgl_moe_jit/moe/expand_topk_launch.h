// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/expand_topk_launch.h: expanding and counting on CUDA, between launcher and binding.
#pragma once

#include <cuda_runtime_api.h>

#include "sgl_moe_jit/moe/ep_topk_params.h"

namespace sgl_moe_jit {
namespace moe {

// Both launch on stream with the current device. Each returns the first status that is no success.
cudaError_t launch_expand_topk(const EpTopkParams& params, bool enable_pdl, cudaStream_t stream);

// counts: [2, W], written in full also for zero tokens.
cudaError_t launch_count_ranks(const EpTopkParams& params, int64_t* counts, bool enable_pdl,
                               cudaStream_t stream);

}  // namespace moe
}  // namespace sgl_moe_jit
