// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/expand_topk.cuh: routed ids as ids sent to the ranks, with shared columns behind them; and
// how many go to each rank. Device code only. Names and rules: moe/ep_topk_params.h.
//
//   bytes = N * (2K + S) * (id + weight)        no flops; a decode batch is all latency
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/ep_topk_params.h"

namespace sgl_moe_jit {
namespace moe {

constexpr int kExpandThreads = 256;
constexpr int kCountThreads = 1024;

template <typename Id>
__device__ __forceinline__ bool is_live(const EpTopkParams& p, uint32_t row) {
  const Id* ids = static_cast<const Id*>(p.topk_ids) + row * static_cast<uint32_t>(p.top_k);
  bool live = false;
  for (int k = 0; k < p.top_k; ++k) live |= ids[k] >= 0;
  return live;
}

// One thread an item of the outputs.
template <typename Id, typename Weight>
__global__ void __launch_bounds__(kExpandThreads) expand_topk_kernel(const EpTopkParams p) {
  // Ids, weights and the count of rows are a predecessor's, and it may still read what the outputs'
  // memory held before.
  device::pdl_wait();
  device::pdl_launch_dependents();
  const uint32_t top_k = static_cast<uint32_t>(p.top_k);
  const uint32_t width = top_k + static_cast<uint32_t>(p.num_shared);
  const uint32_t item = blockIdx.x * uint32_t{kExpandThreads} + threadIdx.x;
  const uint32_t row = item / width, column = item % width;
  if (row >= p.num_tokens) return;
  Id id = -1;
  Weight weight = 0;
  if (row < num_valid_rows(p)) {
    if (column < top_k) {
      const Id routed = static_cast<const Id*>(p.topk_ids)[row * top_k + column];
      id = sent_id(p, routed);
      if (routed >= 0) {
        weight = static_cast<const Weight*>(p.topk_weights)[row * top_k + column];
      }
    } else if (is_live<Id>(p, row)) {
      id = static_cast<Id>(shared_slot(p, p.source_rank) + static_cast<int>(column - top_k));
      weight = static_cast<Weight>(p.shared_weight);
    }
  }
  static_cast<Id*>(p.out_ids)[item] = id;
  static_cast<Weight*>(p.out_weights)[item] = weight;
}

// counts [2, W]: ids >= 0 by owner, then live rows, at source_rank. One block writes them all; more
// add to zeros. Sums of integers: the same in every order.
template <typename Id>
__global__ void __launch_bounds__(kCountThreads)
    count_ranks_kernel(const EpTopkParams p, unsigned long long* counts) {
  __shared__ uint32_t sums[kMaxRanks];
  __shared__ uint32_t live_rows;
  for (int r = threadIdx.x; r < p.num_ranks; r += kCountThreads) sums[r] = 0;
  if (threadIdx.x == 0) live_rows = 0;
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  const uint32_t top_k = static_cast<uint32_t>(p.top_k);
  const uint32_t rows = static_cast<uint32_t>(num_valid_rows(p)), step = gridDim.x * kCountThreads;
  const uint32_t first = blockIdx.x * uint32_t{kCountThreads} + threadIdx.x;
  for (uint32_t slot = first; slot < rows * top_k; slot += step) {
    const Id id = static_cast<const Id*>(p.topk_ids)[slot];
    if (id >= 0) atomicAdd(sums + owner_of(p, id), 1u);
  }
  for (uint32_t row = first; row < rows; row += step) {
    if (is_live<Id>(p, row)) atomicAdd(&live_rows, 1u);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < 2 * p.num_ranks; r += kCountThreads) {
    const bool is_source = r == p.num_ranks + p.source_rank;
    const uint32_t sum = r < p.num_ranks ? sums[r] : is_source ? live_rows : 0;
    if (gridDim.x == 1) {
      counts[r] = sum;
    } else if (sum > 0) {
      atomicAdd(counts + r, static_cast<unsigned long long>(sum));
    }
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
