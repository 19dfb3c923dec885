// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_params.h: one call of the routing kernel as plain pointers and numbers.
//
// T tokens, E experts, K = top_k. Meaning of each setting: sgl_moe_jit.RouterConfig.
#pragma once

#include <cstdint>

namespace sgl_moe_jit {
namespace moe {

constexpr int kRouteMaxExperts = 1024;  // 32 values a lane
constexpr int kRouteMaxTopK = 64;       // two weights a lane
constexpr int kRouteMaxGroups = 32;     // a group a lane

enum class ScoreFunction : int32_t { kSoftmax = 0, kSigmoid = 1, kSqrtSoftplus = 2 };

// Numbered as in sgl_moe_jit/ops/route_topk.py.
enum RouteFlags : int32_t {
  kScoreAfterTopK = 1,  // choose on the logits; scores of the K chosen ones only
  kRoundScores = 2,     // each step is rounded to the logits' type
  kRenormalize = 4,     // divide by the sum
  kClampEpsilon = 8,    // the epsilon is the least sum, not added to it
  kGroupByMax = 16,     // a group's score is its best, not the sum of its two best
};

enum class FloatType : int32_t { kFloat32, kBFloat16, kFloat16 };

struct RouteParams {
  void* weights;            // [T, K] of weights_type
  int32_t* ids;             // [T, K], best first
  const void* logits;       // [T, E], adjacent columns
  const float* bias;        // [E] added to the scores for the choice, or nullptr
  const void* scale;        // [E] of scale_type: factors on the weights, or nullptr
  const void* num_valid;    // one int32 or int64 in place of valid_rows, or nullptr
  int64_t logits_stride;    // between rows, in elements
  int64_t num_tokens;       // T
  int64_t valid_rows;       // rows from it on are padding: id -1, weight 0
  int32_t num_experts;      // E, 1 to kRouteMaxExperts
  int32_t top_k;            // K, 1 to kRouteMaxTopK
  int32_t n_group;          // consecutive groups, 1 to kRouteMaxGroups; 1: none
  int32_t topk_group;       // groups that stay open
  int32_t group_size;       // E / n_group
  int32_t group_inverse;    // e / group_size is e * group_inverse >> kGroupShift
  int32_t num_valid_words;  // of num_valid; 1: int32, 2: int64
  ScoreFunction score_function;
  FloatType weights_type;
  FloatType scale_type;
  int32_t flags;  // RouteFlags
  float epsilon;  // of the sum; 0: none
  float factor;   // on the weights; 1: none
};

// With inverse = ceil(2^20 / size), e * inverse exceeds e / size * 2^20 by less than e, hence by
// less than 2^20 / size for e below 1024: the quotient is exact.
constexpr int kGroupShift = 20;
constexpr int32_t group_inverse(int32_t size) { return ((1 << kGroupShift) + size - 1) / size; }

}  // namespace moe
}  // namespace sgl_moe_jit
