// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/stream.cu: what a finalize moves, without the finalize: the practical roofline.
//
//   out[j] = shared[j] + sum_k rows[k, j]
//
// K + 1 contiguous planes in, one out, 16 bytes an access; no index, no weight. The sum, in
// float32, only keeps the loads. The build passes K as SMJ_TOP_K. Bytes alone decide, so the caller
// tries launch shapes and keeps the best.
#include "bench/stream_launch.h"
#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/host/launch.cuh"

namespace sgl_moe_jit {
namespace bench {
namespace {

constexpr int kTopK = SMJ_TOP_K;
constexpr int kVec = 8;
constexpr int kMaxThreads = 512;

__device__ __forceinline__ void stream(const StreamParams& p) {
  device::pdl_wait();
  device::pdl_launch_dependents();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; v < p.num_vectors;
       v += step) {
    device::Vector<__nv_bfloat16, kVec> loaded[kTopK];
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      loaded[k] = device::load<__nv_bfloat16, kVec>(p.rows + (k * p.num_vectors + v) * kVec);
    }
    auto result = device::load<__nv_bfloat16, kVec>(p.shared + v * kVec);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float sum = device::to_float(result.get(i));
#pragma unroll
      for (int k = 0; k < kTopK; ++k) sum += device::to_float(loaded[k].get(i));
      result.set(i, device::from_float<__nv_bfloat16>(sum));
    }
    device::store<__nv_bfloat16, kVec>(p.out + v * kVec, result);
  }
}

// Without a number of blocks ptxas (13.0, sm_90a) spends 34 registers on K = 8, so that every
// thread of a multiprocessor finds a place, and a thread has some three loads in flight ...
__global__ void __launch_bounds__(kMaxThreads) wide_kernel(const StreamParams p) { stream(p); }

// ... with one it spends 55 and issues all nine loads at once.
__global__ void __launch_bounds__(kMaxThreads, kTopK > 8 ? 1 : 2)
    deep_kernel(const StreamParams p) {
  stream(p);
}

}  // namespace

cudaError_t launch_stream(const StreamParams& p, bool deep, int threads, int blocks,
                          cudaStream_t stream) {
  if (threads > kMaxThreads) return cudaErrorInvalidValue;
  return host::launch_kernel(deep ? deep_kernel : wide_kernel, dim3(blocks), threads, true, stream,
                             p);
}

}  // namespace bench
}  // namespace sgl_moe_jit
