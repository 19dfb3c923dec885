// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/ep_topk_params.h: one call on routed top-k ids under expert parallelism, as plain pointers
// and numbers, for CUDA and CPU alike.
//
// W ranks hold L = E / W routed experts each, and behind them S shared slots. Ids sent to the ranks
// count these blocks of L + S:
//   routed expert e         ->  e + (e / L) * S
//   shared slot s of rank r ->  r * (L + S) + L + s
// N tokens, K = top_k. A row is live if it is no padding and one of its ids is at least 0; only a
// live row has a shared expert. A negative id is nothing to send; it is kept as it is, its weight
// becomes 0.
#pragma once

#include <cstdint>

#ifndef SMJ_HOST_DEVICE
#ifdef __CUDACC__
#define SMJ_HOST_DEVICE __host__ __device__
#else
#define SMJ_HOST_DEVICE
#endif
#endif

namespace sgl_moe_jit {
namespace moe {

// A block has a thread and a counter a rank (moe/waterfill.cuh).
constexpr int kMaxRanks = 512;

// Division of numbers up to a largest one by a divisor that the host knows: a multiplication
// instead of some 20 instructions, of which one block of a thousand threads feels each.
struct Divisor {
  uint32_t value;
  uint32_t factor;  // 2^32 / value, rounded up; 0: divide
};

// Rounding the factor up adds below value to each number's product, so that quotients up to
// 2^32 / (value - 1) stay right.
inline Divisor divisor_of(int64_t value, int64_t largest) {
  const auto divisor = static_cast<uint64_t>(value);
  const bool is_right = value > 1 && static_cast<uint64_t>(largest) * (divisor - 1) < uint64_t{1}
                                                                                          << 32;
  const uint64_t factor = is_right ? ((uint64_t{1} << 32) + divisor - 1) / divisor : 0;
  return {static_cast<uint32_t>(divisor), static_cast<uint32_t>(factor)};
}

SMJ_HOST_DEVICE inline uint32_t divide(uint32_t number, Divisor by) {
  const auto quotient = static_cast<uint32_t>(uint64_t{number} * by.factor >> 32);
  return by.factor != 0 ? quotient : number / by.value;
}

struct EpTopkParams {
  void* out_ids;             // [N, K + S], type of topk_ids; nullptr where only counts are wanted
  void* out_weights;         // [N, K + S], type of topk_weights
  const void* topk_ids;      // [N, K] int32 or int64, contiguous
  const void* topk_weights;  // [N, K] items of weight_bytes
  const void* num_valid;     // one int32 or int64: rows from it on are padding; nullptr: none are
  int64_t num_tokens;        // N
  int32_t top_k;             // K
  int32_t num_experts;       // E, a multiple of W
  int32_t num_ranks;         // W, 1 to kMaxRanks
  int32_t experts_a_rank;    // L
  Divisor by_experts;        // by L, ids below E
  int32_t num_shared;        // S
  int32_t source_rank;       // of these tokens, the home of their shared expert
  uint32_t shared_weight;    // its bits in the type of topk_weights
  int32_t weight_bytes;      // 2 or 4
  int32_t id_words;          // of topk_ids; 1: int32, 2: int64
  int32_t num_valid_words;   // of num_valid, likewise
};

// First row that is padding, 0 to N.
SMJ_HOST_DEVICE inline int64_t num_valid_rows(const EpTopkParams& p) {
  if (p.num_valid == nullptr) return p.num_tokens;
  const int64_t rows = p.num_valid_words == 2 ? *static_cast<const int64_t*>(p.num_valid)
                                              : *static_cast<const int32_t*>(p.num_valid);
  return rows < 0 ? 0 : rows < p.num_tokens ? rows : p.num_tokens;
}

// Rank of an expert >= 0. One that there is not, at or above E, counts for the last rank.
template <typename Id>
SMJ_HOST_DEVICE inline int32_t owner_of(const EpTopkParams& p, Id expert) {
  if (expert >= p.num_experts) return p.num_ranks - 1;
  return static_cast<int32_t>(divide(static_cast<uint32_t>(expert), p.by_experts));
}

// Where an id is sent. One at or above E stays at or above the E + W * S slots there are, in its
// type: who takes it next can still tell.
template <typename Id>
SMJ_HOST_DEVICE inline Id sent_id(const EpTopkParams& p, Id id) {
  if (id < 0) return id;
  if (id < p.num_experts) return static_cast<Id>(id + Id{owner_of(p, id)} * p.num_shared);
  constexpr Id kLargest = static_cast<Id>((uint64_t{1} << (8 * sizeof(Id) - 1)) - 1);
  const Id shift = static_cast<Id>(p.num_ranks * p.num_shared);
  return id > kLargest - shift ? kLargest : id + shift;
}

// First shared slot of a rank.
SMJ_HOST_DEVICE inline int32_t shared_slot(const EpTopkParams& p, int32_t rank) {
  return rank * (p.experts_a_rank + p.num_shared) + p.experts_a_rank;
}

}  // namespace moe
}  // namespace sgl_moe_jit
