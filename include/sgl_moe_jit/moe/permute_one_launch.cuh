// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_one_launch.cuh: the whole permute of a small batch in one kernel. Device code only.
//
// Give each slot the place expert * N + slot. Its row is then the number of slots at lower places,
// plus the padding of lower experts. So each block counts for itself the rows of the K slots that
// it copies, from the ids alone: no block waits for another, and the counting takes place while the
// block's words of hidden are on their way.
//
// Cost, besides the bytes of moe/permute.cuh: N comparisons for each slot and column block of its
// row, N^2 * gridDim.y in all; with an alignment, also a counter an expert in every block.
#pragma once

#include <climits>

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/permute_slots.cuh"

namespace sgl_moe_jit {
namespace moe {

constexpr int kOneLaunchThreads = 128;
constexpr int kTargetsAtOnce = 8;
constexpr int kPlacesAtOnce = 4;  // one 16-byte access
constexpr int kBlockIdsAhead = 4;
constexpr int kSlotsAStep = kBlockIdsAhead * kOneLaunchThreads;
// Words a thread asks for before it counts.
constexpr int kWordsAhead = 4;
// Place of a slot without an expert: above every target.
constexpr int32_t kNowhere = 1 << 30;
// Added to the row of a slot that has none: more than all rows.
constexpr int32_t kNoRow = -(1 << 30);
static_assert(kOneLaunchMaxSlots * (kOneLaunchMaxExperts + 1) < kNowhere, "places stay below it");
static_assert(kOneLaunchMaxSlots + kOneLaunchMaxExperts * kMaxAlignment < -kNoRow, "so do rows");
static_assert(kOneLaunchMaxSlots % kSlotsAStep == 0, "the last step's places have room");
static_assert(kOneLaunchMaxTopK % kTargetsAtOnce == 0, "the last targets' rows have room");

struct OneLaunchShared {
  // The last token's targets are read past its slots; what they count is not used.
  alignas(16) int32_t places[kOneLaunchMaxSlots + kTargetsAtOnce];
  alignas(16) int32_t rows[kOneLaunchMaxTopK];
  int32_t counts[kOneLaunchMaxExperts];  // slots of each expert, where they are needed
};

// Sets the place of every slot, and of those that fill up the last step; adds to counts.
__device__ __forceinline__ void place_slots(const PermuteParams& p, bool needs_counts,
                                            OneLaunchShared& shared) {
  const int num_slots = static_cast<int>(p.num_slots);
#pragma unroll 1
  for (int base = 0; base < num_slots; base += kSlotsAStep) {
    const int first = base + threadIdx.x;
    IdWords ids[kBlockIdsAhead];
#pragma unroll
    for (int j = 0; j < kBlockIdsAhead; ++j) {
      ids[j] = load_id(p, min(first + j * kOneLaunchThreads, num_slots - 1));
    }
#pragma unroll
    for (int j = 0; j < kBlockIdsAhead; ++j) {
      const int slot = first + j * kOneLaunchThreads;
      const int32_t expert = slot < num_slots ? expert_of(p, ids[j]) : -1;
      shared.places[slot] = expert >= 0 ? expert * num_slots + slot : kNowhere;
      if (needs_counts && expert >= 0) atomicAdd(shared.counts + expert, 1);
    }
  }
}

// rows[i] += the rows below targets[i] + offset, which counts in lane i of the first warp. By the
// whole block; rows stand after the next __syncthreads().
template <int kTargets>
__device__ __forceinline__ void add_rows_below(const PermuteParams& p,
                                               const OneLaunchShared& shared,
                                               const int32_t (&targets)[kTargets], int32_t offset,
                                               int32_t* rows) {
  const int num_slots = static_cast<int>(p.num_slots), thread = threadIdx.x, lane = thread % kWarp;
  int32_t sums[kTargets] = {};
#pragma unroll 1
  for (int first = thread * kPlacesAtOnce; first < num_slots;
       first += kOneLaunchThreads * kPlacesAtOnce) {
    const int4 four = *reinterpret_cast<const int4*>(shared.places + first);
    const int32_t places[kPlacesAtOnce] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < kPlacesAtOnce; ++j) {
#pragma unroll
      for (int i = 0; i < kTargets; ++i) {
        // 1 if below
        sums[i] += (static_cast<uint32_t>(places[j]) - static_cast<uint32_t>(targets[i])) >> 31;
      }
    }
  }
  if (p.alignment > 1) {
#pragma unroll 1
    for (int e = thread; e < p.num_experts; e += kOneLaunchThreads) {
      // Padding follows an expert's last slot.
      const int32_t last = e * num_slots + num_slots - 1, count = shared.counts[e];
      const int32_t padding = padded_count(p, count) - count;
#pragma unroll
      for (int i = 0; i < kTargets; ++i) sums[i] += last < targets[i] ? padding : 0;
    }
  }
  int32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kTargets; ++i) {
    const int32_t sum = __reduce_add_sync(kAllLanes, sums[i]);
    if (lane == i) mine = sum;
  }
  if (lane < kTargets) atomicAdd(rows + lane, thread < kWarp ? mine + offset : mine);
}

template <typename Word>
__device__ __forceinline__ void load_words(Word (&words)[kWordsAhead], const Word* source,
                                           int64_t column, int64_t step, int64_t row_words) {
#pragma unroll
  for (int w = 0; w < kWordsAhead; ++w) {
    if (column + w * step < row_words) words[w] = source[column + w * step];
  }
}

// words holds the first of the token's words.
template <typename Word>
__device__ __forceinline__ void copy_token(const PermuteParams& p, int token, int64_t column,
                                           int64_t step, Word (&words)[kWordsAhead],
                                           const Word* source, OneLaunchShared& shared) {
  const int32_t* places = shared.places + token * p.top_k;
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int k = 0; k < p.top_k; k += kTargetsAtOnce) {
    int32_t targets[kTargetsAtOnce];
#pragma unroll
    for (int i = 0; i < kTargetsAtOnce; ++i) targets[i] = places[k + i];
    const bool present = k + lane < p.top_k && places[k + lane] != kNowhere;
    add_rows_below(p, shared, targets, present ? 0 : kNoRow, shared.rows + k);
  }
  __syncthreads();
  if (blockIdx.y == 0 && threadIdx.x < p.top_k) {
    p.row_of[token * p.top_k + threadIdx.x] = max(shared.rows[threadIdx.x], -1);
  }
  const int64_t row_words = words_of_row<Word>(p);
  while (column < row_words) {
#pragma unroll 1
    for (int k = 0; k < p.top_k; k += kTargetsAtOnce) {
      int32_t row[kTargetsAtOnce];
#pragma unroll
      for (int i = 0; i < kTargetsAtOnce; ++i) row[i] = shared.rows[k + i];
#pragma unroll
      for (int w = 0; w < kWordsAhead; ++w) {
        if (column + w * step >= row_words) break;
#pragma unroll
        for (int i = 0; i < kTargetsAtOnce; ++i) {
          if (row[i] >= 0) *word_at<Word>(p, row[i], column + w * step) = words[w];
        }
      }
    }
    column += kWordsAhead * step;
    load_words(words, source, column, step, row_words);
  }
}

template <typename Word>
__device__ __forceinline__ void clear_padding(const PermuteParams& p, int expert, int64_t column,
                                              int64_t step, OneLaunchShared& shared) {
  const int32_t targets[1] = {expert * static_cast<int>(p.num_slots)};
  add_rows_below(p, shared, targets, 0, shared.rows);
  __syncthreads();
  const int32_t count = shared.counts[expert], first = shared.rows[0] + count;
  const int32_t last = shared.rows[0] + padded_count(p, count);
  for (; column < words_of_row<Word>(p); column += step) clear_rows<Word>(p, first, last, column);
}

// blockIdx.x: expert_offsets, then with an alignment the padding of each expert, then each token.
// blockIdx.y: which words of a row.
template <typename Word>
__global__ void __launch_bounds__(kOneLaunchThreads) one_launch_kernel(const PermuteParams p) {
  __shared__ OneLaunchShared shared;
  const int64_t column = blockIdx.y * int64_t{kOneLaunchThreads} + threadIdx.x;
  const int64_t step = gridDim.y * int64_t{kOneLaunchThreads};
  const int num_padded = p.alignment > 1 ? p.num_experts : 0;
  const int item = static_cast<int>(blockIdx.x) - 1, token = item - num_padded;
  const bool needs_counts = item < 0 || p.alignment > 1;
  if (needs_counts) clear(shared.counts, p.num_experts);
  clear(shared.rows, kOneLaunchMaxTopK);
  __syncthreads();

  // A predecessor wrote ids and rows, and may still read what the outputs' memory held before.
  device::pdl_wait();
  device::pdl_launch_dependents();
  if (item < 0 && blockIdx.y > 0) return;

  const Word* source = reinterpret_cast<const Word*>(static_cast<const char*>(p.hidden) +
                                                     max(token, 0) * p.hidden_stride_bytes);
  Word words[kWordsAhead];
  if (token >= 0) load_words(words, source, column, step, words_of_row<Word>(p));
  place_slots(p, needs_counts, shared);
  __syncthreads();
  if (item < 0) {
    const auto count_of = [&](int e) { return shared.counts[e]; };
    place_experts(p, count_of, [&](int e, int32_t) { return count_of(e); });
  } else if (token < 0) {
    clear_padding<Word>(p, item, column, step, shared);
  } else {
    copy_token<Word>(p, token, column, step, words, source, shared);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
