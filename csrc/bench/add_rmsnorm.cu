// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/add_rmsnorm.cu: a plain add-RMSNorm, the second kernel of an engine that does not fuse it.
//
//   s = x + residual;  residual = round(s);  x = round(s * rsqrt(mean(s^2) + eps) * weight)
//
// One block a token, one vector of 16 bytes a thread, so hidden_dim is at most 8192.
#include <cuda_bf16.h>

#include "bench/add_rmsnorm_launch.h"
#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/host/launch.cuh"

namespace sgl_moe_jit {
namespace bench {
namespace {

using Act = __nv_bfloat16;
constexpr int kVec = 8;
constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__global__ void __launch_bounds__(kMaxThreads) add_rmsnorm_kernel(const AddRmsnormParams p) {
  __shared__ float partial[kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden_dim;
  const int column = threadIdx.x * kVec;
  const bool active = column < p.hidden_dim;
  Act* x = static_cast<Act*>(p.x) + row + column;
  Act* residual = static_cast<Act*>(p.residual) + row + column;

  device::pdl_wait();
  device::pdl_launch_dependents();

  float sum[kVec] = {};
  float squares = 0.0f;
  if (active) {
    const auto in = device::load<Act, kVec>(x);
    auto carried = device::load<Act, kVec>(residual);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum[i] = device::to_float(in.get(i)) + device::to_float(carried.get(i));
      squares += sum[i] * sum[i];
      carried.set(i, device::from_float<Act>(sum[i]));
    }
    device::store<Act, kVec>(residual, carried);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = squares;
  __syncthreads();
  const int num_warps = blockDim.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  squares = warp_sum(lane < num_warps ? partial[lane] : 0.0f);
  if (!active) return;
  const float scale = rsqrtf(squares / p.hidden_dim + p.eps);
  const auto weight = device::load<Act, kVec>(static_cast<const Act*>(p.weight) + column);
  device::Vector<Act, kVec> result;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    result.set(i, device::from_float<Act>(sum[i] * scale * device::to_float(weight.get(i))));
  }
  device::store<Act, kVec>(x, result);
}

}  // namespace

cudaError_t launch_add_rmsnorm(const AddRmsnormParams& p, cudaStream_t stream) {
  const int vectors = p.hidden_dim / kVec;
  if (vectors > kMaxThreads) return cudaErrorInvalidValue;
  const unsigned threads = (vectors + kWarp - 1) / kWarp * kWarp;
  return host::launch_kernel(add_rmsnorm_kernel, dim3(p.num_tokens), threads, true, stream, p);
}

}  // namespace bench
}  // namespace sgl_moe_jit
