// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_launch.h: the routing kernel, between its launcher and its binding.
#pragma once

#include <cuda_runtime_api.h>

#include "sgl_moe_jit/moe/route_topk_params.h"

namespace sgl_moe_jit {
namespace moe {

// Launches on stream with the current device. num_tokens must be at least 1. Returns the launch's
// own status.
cudaError_t launch_route_topk(const RouteParams& params, bool enable_pdl, cudaStream_t stream);

}  // namespace moe
}  // namespace sgl_moe_jit
