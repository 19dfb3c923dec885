// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_chunks.cuh: the waterfill of many rows, a chunk a block: count, plan, write. Device
// code only; see moe/waterfill.cuh.
#pragma once

#include "sgl_moe_jit/moe/waterfill.cuh"

namespace sgl_moe_jit {
namespace moe {

__device__ __forceinline__ uint32_t chunk_rows(const WaterfillParams& p, uint32_t first_row) {
  return min(static_cast<uint32_t>(p.topk.num_tokens) - first_row, uint32_t{kChunkRows});
}

// chunk_counts: pairs by rank, then live rows, of each chunk.
template <typename Id>
__global__ void __launch_bounds__(kWaterfillThreads)
    waterfill_count_kernel(const WaterfillParams p) {
  __shared__ RowsShared shared;
  const uint32_t first_row = blockIdx.x * uint32_t{kChunkRows};
  clear_rows(p, 0, shared);
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  read_rows<Id, uint16_t, false>(p, first_row, chunk_rows(p, first_row), shared);
  __syncthreads();
  const int num_ranks = p.topk.num_ranks;
  int32_t* counts = p.chunk_counts + int64_t{blockIdx.x} * (num_ranks + 1);
  for (int r = threadIdx.x; r < num_ranks; r += kWaterfillThreads) {
    counts[r] = static_cast<int32_t>(shared.counts[r]);
  }
  if (threadIdx.x < kWarp) {
    const uint32_t live_rows = scan_live_rows(shared);
    if (lane_of() == 0) counts[num_ranks] = static_cast<int32_t>(live_rows);
  }
}

// One block: the plan, and in place of each chunk's live rows those of the chunks before it.
__global__ void __launch_bounds__(kWaterfillThreads)
    waterfill_plan_kernel(const WaterfillParams p, int num_chunks) {
  __shared__ PlanShared shared;
  __shared__ uint32_t counts[kMaxRanks];
  const int num_ranks = p.topk.num_ranks;
  for (int r = threadIdx.x; r < num_ranks; r += kWaterfillThreads) counts[r] = 0;
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  const uint32_t width = static_cast<uint32_t>(num_ranks) + 1;
  const uint32_t items = static_cast<uint32_t>(num_chunks) * width;
  for (uint32_t i = threadIdx.x; i < items; i += kWaterfillThreads) {
    const uint32_t rank = i % width;
    if (rank < width - 1) atomicAdd(counts + rank, static_cast<uint32_t>(p.chunk_counts[i]));
  }
  uint32_t live_rows = 0;
  if (threadIdx.x < kWarp) {
    for (int base = 0; base < num_chunks; base += kWarp) {
      const int chunk = base + lane_of();
      int32_t* live = p.chunk_counts + int64_t{chunk} * width + num_ranks;
      const uint32_t value = chunk < num_chunks ? static_cast<uint32_t>(*live) : 0;
      const uint32_t inclusive = warp_inclusive_scan(value);
      if (chunk < num_chunks) *live = static_cast<int32_t>(live_rows + inclusive - value);
      live_rows += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }
  }
  __syncthreads();
  make_plan<false>(p, counts, live_rows, shared);
  __syncthreads();
  const auto* plan = reinterpret_cast<const int64_t*>(&shared.plan);
  constexpr int kItems = sizeof(WaterfillPlan) / sizeof(int64_t);
  for (int i = threadIdx.x; i < kItems; i += kWaterfillThreads) p.plan[i] = plan[i];
}

template <typename Id, typename Weight>
__global__ void __launch_bounds__(kWaterfillThreads)
    waterfill_write_kernel(const WaterfillParams p) {
  __shared__ RowsShared shared;
  const uint32_t first_row = blockIdx.x * uint32_t{kChunkRows};
  const uint32_t num_rows = chunk_rows(p, first_row);
  clear_rows(p, static_cast<int>(num_rows), shared);
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  auto* plan = reinterpret_cast<int64_t*>(&shared.plan.plan);
  constexpr int kItems = sizeof(WaterfillPlan) / sizeof(int64_t);
  for (int i = threadIdx.x; i < kItems; i += kWaterfillThreads) plan[i] = p.plan[i];
  const int64_t width = p.topk.num_ranks + 1;
  const int64_t tokens_before = p.chunk_counts[blockIdx.x * width + p.topk.num_ranks];
  read_rows<Id, Weight, true>(p, first_row, num_rows, shared);
  __syncthreads();
  if (threadIdx.x < kWarp) scan_live_rows(shared);
  __syncthreads();
  if (p.mode == WaterfillMode::kRestricted) {
    choose_restricted(p, static_cast<int32_t>(blockIdx.x), shared);
    __syncthreads();
  }
  write_shared_column<Id, Weight>(p, first_row, num_rows, tokens_before, shared);
}

}  // namespace moe
}  // namespace sgl_moe_jit
