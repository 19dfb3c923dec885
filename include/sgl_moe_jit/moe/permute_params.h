// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_params.h: one permute call as plain pointers and numbers, for CUDA and CPU alike.
//
//   first_row[e] = sum over lower experts of their slots, each sum rounded up to the alignment
//   row_of[t, k] = first_row[e] + number of earlier slots of e          e = topk_ids[t, k]
//   permuted[row_of[t, k]] = hidden[t];  other rows below the last expert's end are zero
//
// T tokens, K = top_k, N = T * K slots, E experts, A = alignment. A slot whose id is outside [0, E)
// has no row.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SMJ_HOST_DEVICE __host__ __device__
#else
#define SMJ_HOST_DEVICE
#endif

namespace sgl_moe_jit {
namespace moe {

// The counters of one warp must fit in shared memory (moe/permute_slots.cuh).
constexpr int kMaxExperts = 4096;
constexpr int kMaxAlignment = 1024;

// Kernels a call launches. As numbered by Path in ops/permute_kernel.py; the same rows on each.
enum class PermutePath : int { kOneLaunch = 1, kTwoLaunches = 2, kFourLaunches = 4 };

// What one launch can do: every block keeps a counter an expert and K rows in shared memory.
constexpr int kOneLaunchMaxSlots = 4096;
constexpr int kOneLaunchMaxExperts = 1024;
constexpr int kOneLaunchMaxTopK = 64;

struct PermuteParams {
  void* permuted;           // [max_rows, H] contiguous; not written from expert_offsets[E - 1] on
  int32_t* row_of;          // [N]; -1 = no row
  int32_t* expert_offsets;  // [E], end of each expert's rows, padding included
  const void* hidden;       // [T, H]
  const void* topk_ids;     // [N] int32 or int64
  int32_t* scratch;         // [E, num_chunks] counters; nullptr with num_chunks = 0
  int32_t* counts;          // [E] slots of each expert, between kernels; nullptr: nobody reads them
  int64_t num_tokens;       // T
  int64_t num_slots;        // N, below 2^31
  int64_t row_bytes;        // H elements
  int64_t hidden_stride_bytes;  // between rows of hidden
  int32_t item_bytes;           // 2, 4 or 8
  int32_t top_k;                // K
  int32_t num_experts;          // E, 1 to kMaxExperts
  int32_t alignment;            // A, 1 to kMaxAlignment
  int32_t num_chunks;           // stretches of slots counted apart by kFourLaunches
  int32_t id_words;             // 1: int32 ids, 2: int64
};

SMJ_HOST_DEVICE inline int32_t expert_of_slot(const PermuteParams& p, int64_t slot) {
  const int64_t id = p.id_words == 2 ? static_cast<const int64_t*>(p.topk_ids)[slot]
                                     : static_cast<const int32_t*>(p.topk_ids)[slot];
  return id >= 0 && id < p.num_experts ? static_cast<int32_t>(id) : -1;
}

// Rows of an expert with this many slots.
SMJ_HOST_DEVICE inline int32_t padded_count(const PermuteParams& p, int32_t count) {
  if (p.alignment == 1) return count;
  return (count + p.alignment - 1) / p.alignment * p.alignment;
}

// The most rows that N slots can need: min(E, N) experts have any, each up to A - 1 more.
inline int64_t max_rows(int64_t num_slots, int64_t num_experts, int64_t alignment) {
  const int64_t used = num_slots < num_experts ? num_slots : num_experts;
  return (num_slots + used * (alignment - 1)) / alignment * alignment;
}

}  // namespace moe
}  // namespace sgl_moe_jit
