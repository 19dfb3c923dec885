// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_params.h: one permute call as plain pointers and numbers, for CUDA and CPU alike.
//
//   row_of[t, k] = number of slots of lower experts + number of earlier slots of the same expert
//   permuted[row_of[t, k]] = hidden[t]
//
// T tokens, K = top_k, N = T * K slots, E experts. A slot whose id is outside [0, E) has no row.
#pragma once

#include <cstdint>

namespace sgl_moe_jit {
namespace moe {

// The counters of one warp must fit in shared memory (moe/permute.cuh).
constexpr int kMaxExperts = 4096;

struct PermuteParams {
  void* permuted;           // [N, H] contiguous; rows at and beyond expert_offsets[E - 1] unwritten
  int32_t* row_of;          // [N]; -1 = no row
  int32_t* expert_offsets;  // [E], end of each expert's rows
  const void* hidden;       // [T, H]
  const void* topk_ids;     // [N] int32 or int64
  int32_t* scratch;    // [E, num_chunks] counters, then [E] totals; nullptr with num_chunks = 0
  int64_t num_tokens;  // T
  int64_t num_slots;   // N, below 2^31
  int64_t row_bytes;   // H elements
  int64_t hidden_stride_bytes;  // between rows of hidden
  int32_t item_bytes;           // 2, 4 or 8
  int32_t top_k;                // K
  int32_t num_experts;          // E, 1 to kMaxExperts
  int32_t num_chunks;           // stretches of slots counted apart; 0 = one block does it all
  bool ids_are_64;
};

inline
#ifdef __CUDACC__
    __host__ __device__
#endif
        int32_t expert_of_slot(const PermuteParams& p, int64_t slot) {
  const int64_t id = p.ids_are_64 ? static_cast<const int64_t*>(p.topk_ids)[slot]
                                  : static_cast<const int32_t*>(p.topk_ids)[slot];
  return id >= 0 && id < p.num_experts ? static_cast<int32_t>(id) : -1;
}

}  // namespace moe
}  // namespace sgl_moe_jit
