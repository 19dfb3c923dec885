// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_slots.cuh: how warps count and rank slots by expert. Device code only.
//
// A warp owns a contiguous chunk of slots and a counter for each expert in shared memory, so ranks
// follow from the order of slots alone: no atomics whose order shows, and the same bits on every
// run.
#pragma once

#include "sgl_moe_jit/moe/permute_params.h"

namespace sgl_moe_jit {
namespace moe {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
// Ids a lane loads before it uses the first: one trip to memory instead of eight.
constexpr int kIdsAhead = 8;

// An id as its two words, the same code for both widths: of a 32-bit id, the second is the first
// again and does not count. Callers load several before they ask for the first expert, and past the
// end they load the last id: nvcc 13.0 makes a load under a condition wait for the one before.
struct IdWords {
  uint32_t low, high;
};

template <typename Index>
__device__ __forceinline__ IdWords load_id(const PermuteParams& p, Index slot) {
  const auto* words = static_cast<const uint32_t*>(p.topk_ids) + slot * p.id_words;
  return {words[0], words[p.id_words - 1]};
}

__device__ __forceinline__ int32_t expert_of(const PermuteParams& p, IdWords id) {
  const uint32_t high = id.high & static_cast<uint32_t>(1 - p.id_words);
  return high == 0 && id.low < static_cast<uint32_t>(p.num_experts) ? static_cast<int32_t>(id.low)
                                                                    : -1;
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
    IdWords ids[kIdsAhead];
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) ids[j] = load_id(p, min(base + j * kWarp + lane, end - 1));
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) {
      const int64_t slot = base + j * kWarp + lane;
      if (base + j * kWarp < end) body(slot, slot < end ? expert_of(p, ids[j]) : -1);
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

// Calls place(e, first_row) for each expert, whose slots it returns again; count_of(e) says them
// beforehand. Block 0 writes expert_offsets. Every thread of the block must call it, once.
template <typename CountOf, typename Place>
__device__ __forceinline__ void place_experts(const PermuteParams& p, const CountOf& count_of,
                                              const Place& place) {
  const int per_thread = (p.num_experts + blockDim.x - 1) / blockDim.x;
  const int first = min(p.num_experts, static_cast<int>(threadIdx.x) * per_thread);
  const int last = min(p.num_experts, first + per_thread);
  int32_t sum = 0;
  for (int e = first; e < last; ++e) sum += padded_count(p, count_of(e));
  int32_t row = block_exclusive_scan(sum);
  for (int e = first; e < last; ++e) {
    row += padded_count(p, place(e, row));
    if (blockIdx.x == 0) p.expert_offsets[e] = row;
  }
}

__device__ __forceinline__ void clear(int32_t* counters, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
}

template <typename Word>
__device__ __forceinline__ int64_t words_of_row(const PermuteParams& p) {
  return p.row_bytes / static_cast<int64_t>(sizeof(Word));
}

template <typename Word>
__device__ __forceinline__ Word* word_at(const PermuteParams& p, int32_t row, int64_t column) {
  // Rows and the bytes of a row are below 2^31, so that one multiplication does.
  auto* first = reinterpret_cast<char*>(static_cast<Word*>(p.permuted) + column);
  return reinterpret_cast<Word*>(first + static_cast<uint64_t>(static_cast<uint32_t>(row)) *
                                             static_cast<uint32_t>(p.row_bytes));
}

// Zeros one word of each row of [first, last).
template <typename Word>
__device__ __forceinline__ void clear_rows(const PermuteParams& p, int32_t first, int32_t last,
                                           int64_t column) {
#pragma unroll 1
  for (int32_t row = first; row < last; ++row) *word_at<Word>(p, row, column) = Word{};
}

}  // namespace moe
}  // namespace sgl_moe_jit
