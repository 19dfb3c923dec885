// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/flashinfer_finalize_launch.h: flashinfer's finalize as its binding here sees it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sgl_moe_jit {
namespace bench {

// out[t] = sum_k expert_weights[t, k] * gemm2_out[row_of[t, k]]
struct FlashinferFinalizeParams {
  void* out;             // [T, H] bfloat16
  void* gemm2_out;       // [P, H_pad] bfloat16
  int32_t* row_of;       // [T, K]
  void* expert_weights;  // [T, K] float32
  int num_tokens, hidden_dim, padded_hidden_dim, top_k;
};

// Throws what flashinfer throws; a launch error ends up there too.
void launch_flashinfer_finalize(const FlashinferFinalizeParams& p, cudaStream_t stream);

}  // namespace bench
}  // namespace sgl_moe_jit
