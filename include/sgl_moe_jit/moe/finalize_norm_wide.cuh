// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_wide.cuh: finalize_norm.cuh's kernel for rows of any width and alignment.
// Device code only.
#pragma once

#include "sgl_moe_jit/moe/finalize_norm.cuh"

namespace sgl_moe_jit {
namespace moe {

// A thread's columns into shared memory and back: four side by side, then the next four blockDim.x
// places on, so that neighbouring threads touch neighbouring banks.
template <int kColumns>
__device__ __forceinline__ void hold(float4* place, const float (&s)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    place[i / 4 * blockDim.x] = make_float4(s[i], s[i + 1], s[i + 2], s[i + 3]);
  }
}
template <int kColumns>
__device__ __forceinline__ void take(float (&s)[kColumns], const float4* place) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 4) {
    const float4 four = place[i / 4 * blockDim.x];
    s[i] = four.x, s[i + 1] = four.y, s[i + 2] = four.z, s[i + 3] = four.w;
  }
}

// The bytes of shared memory it needs: a float a column, whole pieces for every thread.
constexpr int64_t wide_bytes(int64_t hidden_dim, int columns, int threads) {
  const int64_t round = static_cast<int64_t>(columns) * threads;
  return (hidden_dim + round - 1) / round * round * sizeof(float);
}

// A row in the shared memory of one block; a thread reads back only what it wrote.
template <typename Act, typename Weight, int kTopK, bool kQuantised, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads, Shape::kMinBlocks)
    finalize_norm_wide_kernel(const FinalizeNormParams p) {
  using Row = NormRow<Act, Weight, kTopK, kQuantised, Shape::kVec, Shape::kRowsInFlight>;
  constexpr int kColumns = Row::kColumns;
  const int64_t token = blockIdx.y + blockIdx.z * kNormTokensInY;
  if (token >= p.sum.num_tokens) return;
  extern __shared__ float4 held[];
  __shared__ SlotMemory memory;
  BlockExchange exchange(memory);
  const int step = blockDim.x * kColumns;
  const int first = threadIdx.x * kColumns;
  // A warp leaves the loops as a whole, once its first lane is beyond the row.
  const int end = p.sum.hidden_dim - (first - threadIdx.x % 32 * kColumns);
  const int num_slots = (p.sum.hidden_dim + 32 * kColumns - 1) / (32 * kColumns);
  const FinalizeParams routed = without_shared(p.sum);
  Row row(p, routed, token, first);
  row.prefetch(0);
  device::pdl_wait();
  row.load_routing();
  device::pdl_launch_dependents();

  float s[kColumns];
  float4* place = held + threadIdx.x;
  int slot = threadIdx.x / 32;
#pragma unroll 1
  for (int ahead = 0; ahead < end; ahead += step) {
    row.add(ahead, row.sides(ahead), s);
    hold(place, s);
    exchange.put(0, slot, warp_sum(sum_of_squares(s)));
    row.store_sum(ahead, s);
    place += kColumns / 4 * blockDim.x;
    slot += blockDim.x / 32;
  }
  const float total = total_of<kColumns>(exchange.wait(0), num_slots);
  const float inv = math::inverse_rms(total, p.sum.hidden_dim, p.eps);

  float inverse_scale = 1.0f;
  if constexpr (kQuantised) {
    place = held + threadIdx.x;
    slot = threadIdx.x / 32;
#pragma unroll 1
    for (int ahead = 0; ahead < end; ahead += step) {
      take(s, place);
      row.normalise(s, inv, row.norm_weight(ahead));
      hold(place, s);
      exchange.put(1, slot, warp_max(largest(s)));
      place += kColumns / 4 * blockDim.x;
      slot += blockDim.x / 32;
    }
    const float scale = math::fp8_scale(largest_of(exchange.wait(1), num_slots));
    inverse_scale = math::fp8_inverse_scale(scale);
    if (first == 0) p.scale[token] = scale;
  }
  place = held + threadIdx.x;
#pragma unroll 1
  for (int ahead = 0; ahead < end; ahead += step) {
    take(s, place);
    if constexpr (!kQuantised) row.normalise(s, inv, row.norm_weight(ahead));
    row.store(ahead, s, inverse_scale);
    place += kColumns / 4 * blockDim.x;
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
