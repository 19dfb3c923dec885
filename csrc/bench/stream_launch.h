// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/stream_launch.h: the parameters of the streaming kernel, and its launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace sgl_moe_jit {
namespace bench {

struct StreamParams {
  __nv_bfloat16* out;           // [N]
  const __nv_bfloat16* rows;    // [K, N]
  const __nv_bfloat16* shared;  // [N]
  int64_t num_vectors;          // N / 8
};

// The build passes K as SMJ_TOP_K. Launched with PDL.
//   deep     every load of a thread in flight at once, or more threads with fewer
//   threads  a block, at most 512
cudaError_t launch_stream(const StreamParams& p, bool deep, int threads, int blocks,
                          cudaStream_t stream);

}  // namespace bench
}  // namespace sgl_moe_jit
