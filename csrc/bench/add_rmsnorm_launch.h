// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/add_rmsnorm_launch.h: add-RMSNorm in place: ours, and flashinfer's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sgl_moe_jit {
namespace bench {

// residual += x; x = residual * rsqrt(mean(residual^2) + eps) * weight. bfloat16, contiguous.
struct AddRmsnormParams {
  void* x;         // [T, H]
  void* residual;  // [T, H]
  void* weight;    // [H]
  int num_tokens;
  int hidden_dim;
  float eps;
};

// Either is launched with PDL. Of the two one is built: add_rmsnorm.cu or flashinfer_norm.cu.
cudaError_t launch_add_rmsnorm(const AddRmsnormParams& p, cudaStream_t stream);

}  // namespace bench
}  // namespace sgl_moe_jit
