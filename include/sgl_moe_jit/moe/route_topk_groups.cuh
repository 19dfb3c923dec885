// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_groups.cuh: which groups of experts a token may choose from. Device code only. For
// moe/route_topk.cuh.
#pragma once

#include <cstdint>

#include "sgl_moe_jit/moe/route_topk_scores.cuh"

namespace sgl_moe_jit {
namespace moe {
namespace route {

// The two largest keys of a group that this lane has seen; NaN counts as -infinity.
struct TwoBest {
  int32_t best = kClosed, second = kClosed;

  __device__ __forceinline__ void add(int32_t key) {
    second = max(second, min(best, key));
    best = max(best, key);
  }

  // The key of the group's score, in all lanes.
  __device__ __forceinline__ int32_t group_key(const RouteParams& p, int lane) const {
    const int32_t top = __reduce_max_sync(kAll, best);
    if ((p.flags & kGroupByMax) || p.group_size == 1) return top;
    const int holder = __ffs(__ballot_sync(kAll, best == top)) - 1;
    const int32_t next = __reduce_max_sync(kAll, lane == holder ? second : best);
    return order_key(__fadd_rn(value_of(top), value_of(next)));
  }
};

// Lane g gets the key of group g's score, lanes without a group kClosed.
template <int kValues>
__device__ __forceinline__ int32_t group_keys(const RouteParams& p, const int32_t (&key)[kValues],
                                              int lane) {
  int32_t mine = kClosed;
  if (p.group_size % 32 == 0) {  // whole values of every lane make a group
    TwoBest found;
    int group = 0, left = p.group_size;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i * 32 < p.num_experts) {
        found.add(max(key[i], kNegInfinity));
        left -= 32;
        if (left == 0) {
          const int32_t score = found.group_key(p, lane);
          if (lane == group) mine = score;
          ++group;
          left = p.group_size;
          found = TwoBest();
        }
      }
    }
    return mine;
  }
#pragma unroll 1
  for (int group = 0; group < p.n_group; ++group) {
    const int first = group * p.group_size - lane;
    TwoBest found;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const bool inside =
          static_cast<uint32_t>(i * 32 - first) < static_cast<uint32_t>(p.group_size);
      found.add(inside ? max(key[i], kNegInfinity) : kClosed);
    }
    const int32_t score = found.group_key(p, lane);
    if (lane == group) mine = score;
  }
  return mine;
}

// Closes the experts of all but the best topk_group groups; equal groups go to the lower one.
template <int kValues>
__device__ __forceinline__ void close_groups(const RouteParams& p, int32_t (&key)[kValues],
                                             int lane) {
  int32_t mine = group_keys(p, key, lane);
  uint32_t open = 0;
#pragma unroll 1
  for (int n = 0; n < p.topk_group; ++n) {
    const uint32_t holders = __ballot_sync(kAll, mine == __reduce_max_sync(kAll, mine));
    const uint32_t first = holders & -holders;
    open |= first;
    if (first >> lane & 1) mine = kClosed;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int group = (i * 32 + lane) * p.group_inverse >> kGroupShift;
    if ((open >> (group & 31) & 1) == 0) key[i] = kClosed;
  }
}

}  // namespace route
}  // namespace moe
}  // namespace sgl_moe_jit
