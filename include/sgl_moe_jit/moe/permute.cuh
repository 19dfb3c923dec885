// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute.cuh: each token's row copied once for every expert it goes to. Device code only.
//
// A stable counting sort of the slots by expert, then one gather. A warp owns a contiguous chunk of
// slots and a counter for each expert in shared memory, so ranks follow from the order of slots
// alone: no atomics whose order shows, and the same bits on every run.
//
//   few slots:   index_kernel (count, scan and rank in one block)          -> gather_kernel
//   many slots:  count_kernel -> scan_kernel (a block an expert) -> rank_kernel -> gather_kernel
//
// Cost, T tokens, K' <= K rows a token, H hidden, A bytes an element, I bytes an id:
//   bytes = A * T * H * (1 + K') + T * K * (2 I + 8) [+ 12 E * chunks]         flops = 0
// The gather is the memory's speed; below a few hundred tokens it is the latency of two launches.
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/permute_params.h"

namespace sgl_moe_jit {
namespace moe {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kIndexMaxWarps = 16;
constexpr int kChunkMaxWarps = 8;  // 8 counters of 4 bytes: one 32-byte sector of scratch
constexpr int kScanThreads = 256;
constexpr int kGatherThreads = 128;
// 44 KB of the 48 KB a block has without asking for more; the block scan takes its share besides.
constexpr int kSharedCounters = 11264;
static_assert(kSharedCounters >= kMaxExperts, "one warp's counters must fit");
// Ids a lane loads before it uses the first: one trip to memory instead of eight.
constexpr int kIdsAhead = 8;

__host__ __device__ inline int warps_that_fit(int num_experts, int max_warps) {
  const int fit = kSharedCounters / num_experts;
  return fit < max_warps ? fit : max_warps;
}

// Slots of one warp: the first num_slots / num_chunks, rounded up to whole warps, and so on.
__device__ __forceinline__ int64_t chunk_size(int64_t num_slots, int num_chunks) {
  return (num_slots + num_chunks * int64_t{kWarp} - 1) / (num_chunks * int64_t{kWarp}) * kWarp;
}

// Calls body(slot, expert) for each slot of [begin, end) in ascending order, 32 neighbours at a
// time, by all lanes of a warp together; expert is -1 past the end and where there is no expert.
template <typename Body>
__device__ __forceinline__ void for_each_slot(const PermuteParams& p, int64_t begin, int64_t end,
                                              const Body& body) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t base = begin; base < end; base += kIdsAhead * kWarp) {
    int32_t expert[kIdsAhead];
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) {
      const int64_t slot = base + j * kWarp + lane;
      expert[j] = slot < end ? expert_of_slot(p, slot) : -1;
    }
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) {
      if (base + j * kWarp < end) body(base + j * kWarp + lane, expert[j]);
    }
  }
}

__device__ __forceinline__ void count_slots(const PermuteParams& p, int64_t begin, int64_t end,
                                            int32_t* counts) {
  for_each_slot(p, begin, end, [&](int64_t, int32_t expert) {
    if (expert >= 0) atomicAdd(counts + expert, 1);
  });
}

// Gives each slot its row; next[e] is the first row of expert e that this warp may hand out.
__device__ __forceinline__ void rank_slots(const PermuteParams& p, int64_t begin, int64_t end,
                                           int32_t* next) {
  const unsigned lanes_before = (1u << (threadIdx.x % kWarp)) - 1;
  for_each_slot(p, begin, end, [&](int64_t slot, int32_t expert) {
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const int before = __popc(same & lanes_before);
    const int32_t row = expert >= 0 ? next[expert] + before : -1;
    __syncwarp();  // every lane has read its counter before the first of each expert moves it on
    if (expert >= 0 && before == 0) next[expert] += __popc(same);
    __syncwarp();
    if (slot < end) p.row_of[slot] = row;
  });
}

// Exclusive prefix sum of one value a thread over the block. Every thread must call it, once.
__device__ __forceinline__ int32_t block_exclusive_scan(int32_t value) {
  __shared__ int32_t warp_sums[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t left = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += left;
  }
  if (lane == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  int32_t before = 0;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  return before + inclusive - value;
}

__device__ __forceinline__ void clear(int32_t* counters, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
}

// One block: row_of and expert_offsets of all slots. Also right for zero slots.
__global__ void __launch_bounds__(kIndexMaxWarps* kWarp) index_kernel(const PermuteParams p) {
  __shared__ int32_t counters[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  int32_t* mine = counters + warp * p.num_experts;
  const int64_t chunk = chunk_size(p.num_slots, num_warps);
  const int64_t begin = min(p.num_slots, warp * chunk), end = min(p.num_slots, begin + chunk);
  clear(counters, num_warps * p.num_experts);
  __syncthreads();

  // A predecessor wrote the ids, and may still read what the outputs' memory held before.
  device::pdl_wait();
  device::pdl_launch_dependents();

  count_slots(p, begin, end, mine);
  __syncthreads();
  const int per_thread = (p.num_experts + blockDim.x - 1) / blockDim.x;
  const int first = min(p.num_experts, static_cast<int>(threadIdx.x) * per_thread);
  const int last = min(p.num_experts, first + per_thread);
  int32_t sum = 0;
  for (int e = first; e < last; ++e) {
    for (int w = 0; w < num_warps; ++w) sum += counters[w * p.num_experts + e];
  }
  int32_t base = block_exclusive_scan(sum);
  for (int e = first; e < last; ++e) {
    for (int w = 0; w < num_warps; ++w) {
      const int32_t count = counters[w * p.num_experts + e];
      counters[w * p.num_experts + e] = base;
      base += count;
    }
    p.expert_offsets[e] = base;
  }
  __syncthreads();
  rank_slots(p, begin, end, mine);
}

// A chunk a warp: scratch[e, chunk] = its slots of expert e.
__global__ void __launch_bounds__(kChunkMaxWarps* kWarp) count_kernel(const PermuteParams p) {
  __shared__ int32_t counters[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const int first_chunk = blockIdx.x * num_warps;
  const int64_t chunk = chunk_size(p.num_slots, p.num_chunks);
  const int64_t begin = min(p.num_slots, (first_chunk + warp) * chunk);
  clear(counters, num_warps * p.num_experts);
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  count_slots(p, begin, min(p.num_slots, begin + chunk), counters + warp * p.num_experts);
  __syncthreads();
  for (int i = threadIdx.x; i < num_warps * p.num_experts; i += blockDim.x) {
    const int e = i / num_warps, w = i % num_warps;
    if (first_chunk + w < p.num_chunks) {
      p.scratch[int64_t{e} * p.num_chunks + first_chunk + w] = counters[w * p.num_experts + e];
    }
  }
}

// A block an expert: its counts become exclusive prefix sums over the chunks; the total goes behind
// all counts.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const PermuteParams p) {
  int32_t* counts = p.scratch + int64_t{blockIdx.x} * p.num_chunks;
  const int per_thread = (p.num_chunks + kScanThreads - 1) / kScanThreads;
  const int first = min(p.num_chunks, static_cast<int>(threadIdx.x) * per_thread);
  const int last = min(p.num_chunks, first + per_thread);
  device::pdl_wait();
  device::pdl_launch_dependents();
  int32_t sum = 0;
  for (int c = first; c < last; ++c) sum += counts[c];
  int32_t base = block_exclusive_scan(sum);
  for (int c = first; c < last; ++c) {
    const int32_t count = counts[c];
    counts[c] = base;
    base += count;
  }
  if (threadIdx.x == kScanThreads - 1) {
    p.scratch[int64_t{p.num_experts} * p.num_chunks + blockIdx.x] = base;
  }
}

// A chunk a warp, as in count_kernel: row_of of its slots; block 0 writes expert_offsets.
__global__ void __launch_bounds__(kChunkMaxWarps* kWarp) rank_kernel(const PermuteParams p) {
  __shared__ int32_t next[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const int first_chunk = blockIdx.x * num_warps;
  const int64_t chunk = chunk_size(p.num_slots, p.num_chunks);
  const int64_t begin = min(p.num_slots, (first_chunk + warp) * chunk);
  const int per_thread = (p.num_experts + blockDim.x - 1) / blockDim.x;
  const int first = min(p.num_experts, static_cast<int>(threadIdx.x) * per_thread);
  const int last = min(p.num_experts, first + per_thread);
  const int32_t* totals = p.scratch + int64_t{p.num_experts} * p.num_chunks;
  device::pdl_wait();
  device::pdl_launch_dependents();
  int32_t sum = 0;
  for (int e = first; e < last; ++e) sum += totals[e];
  int32_t base = block_exclusive_scan(sum);
  for (int e = first; e < last; ++e) {
    for (int w = 0; w < num_warps; ++w) {
      if (first_chunk + w < p.num_chunks) {
        next[w * p.num_experts + e] = base + p.scratch[int64_t{e} * p.num_chunks + first_chunk + w];
      }
    }
    base += totals[e];
    if (blockIdx.x == 0) p.expert_offsets[e] = base;
  }
  __syncthreads();
  rank_slots(p, begin, min(p.num_slots, begin + chunk), next + warp * p.num_experts);
}

// A token (blockIdx.x) and kGatherThreads words of its row (blockIdx.y): read once, stored for each
// of its slots.
template <typename Word>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const PermuteParams p) {
  constexpr int kSlotsAhead = 4;
  const int64_t token = blockIdx.x;
  const int64_t column = blockIdx.y * int64_t{kGatherThreads} + threadIdx.x;
  const int64_t row_words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  device::pdl_wait();
  device::pdl_launch_dependents();
  if (column >= row_words) return;
  const auto* source = static_cast<const char*>(p.hidden) + token * p.hidden_stride_bytes;
  const Word word = reinterpret_cast<const Word*>(source)[column];
  Word* out = static_cast<Word*>(p.permuted) + column;
  const int32_t* row_of = p.row_of + token * p.top_k;
  for (int k = 0; k < p.top_k; k += kSlotsAhead) {
    int32_t row[kSlotsAhead];
#pragma unroll
    for (int j = 0; j < kSlotsAhead; ++j) row[j] = k + j < p.top_k ? row_of[k + j] : -1;
#pragma unroll
    for (int j = 0; j < kSlotsAhead; ++j) {
      if (row[j] >= 0) out[row[j] * row_words] = word;
    }
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
