// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_plan.cuh: from loads and tokens to the plan by which tokens pick their rank. Device
// code only; one block, whose first warp does what does not split up. Rules:
// moe/waterfill_params.h.
#pragma once

#include "sgl_moe_jit/moe/waterfill_params.h"

namespace sgl_moe_jit {
namespace moe {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWaterfillThreads = 1024;

struct PlanShared {
  WaterfillPlan plan;
  uint32_t is_filled[kMaxRanks];  // whether the tokens reach a rank's load
};

__device__ __forceinline__ int lane_of() { return threadIdx.x % kWarp; }

__device__ __forceinline__ int32_t warp_sum(int32_t value) {
  return __reduce_add_sync(kAllLanes, value);
}

// Three sums of at most 26 bits a lane, by the instruction that has 32: shuffles of 64 bits take
// four times as long, and a plan is a chain of such sums.
__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  constexpr int kBits = 26;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const uint64_t bits = static_cast<uint64_t>(value);
  const uint64_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(bits) & kMask);
  const uint64_t middle =
      __reduce_add_sync(kAllLanes, static_cast<uint32_t>(bits >> kBits) & kMask);
  const uint64_t high = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(bits >> (2 * kBits)));
  return static_cast<int64_t>(low + (middle << kBits) + (high << (2 * kBits)));
}

// Largest value of the warp.
__device__ __forceinline__ int64_t warp_max(int64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const int64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

template <typename Int>
__device__ __forceinline__ Int warp_inclusive_scan(Int value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Int left = __shfl_up_sync(kAllLanes, value, step);
    if (lane_of() >= step) value += left;
  }
  return value;
}

// Calls body(r) with each rank below num_ranks once, and with as many at or above it as make whole
// warps: all lanes are in every call.
template <typename Body>
__device__ __forceinline__ void for_each_rank(int num_ranks, const Body& body) {
  for (int base = 0; base < num_ranks; base += kWarp) body(base + lane_of());
}

// By the first warp: replaces the values in first[0, W) by the sum of those below, first[W] by all.
// Sum: holds the sum of all.
template <typename Sum>
__device__ __forceinline__ void sum_below(int num_ranks, int64_t* first) {
  Sum before = 0;
  for_each_rank(num_ranks, [&](int r) {
    const Sum value = r < num_ranks ? static_cast<Sum>(first[r]) : 0;
    const Sum inclusive = warp_inclusive_scan(value);
    if (r < num_ranks) first[r] = before + inclusive - value;
    before += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
  });
  if (lane_of() == 0) first[num_ranks] = before;
}

__device__ __forceinline__ int64_t tokens_of(const WaterfillParams& p, int rank,
                                             int64_t own_tokens) {
  if (p.tokens_per_rank == nullptr) return rank == p.topk.source_rank ? own_tokens : 0;
  return max(p.tokens_per_rank[rank], int64_t{0});
}

// By the whole block: marks the ranks whose load the tokens reach if they fill all lower ones up to
// it. A warp a rank. Int: as of plan_exact.
template <typename Int>
__device__ __forceinline__ void mark_filled(int num_ranks, PlanShared& shared) {
  const WaterfillPlan& plan = shared.plan;
  for (int rank = threadIdx.x / kWarp; rank < num_ranks; rank += kWaterfillThreads / kWarp) {
    const auto load = static_cast<Int>(plan.load[rank]);
    Int room = 0;
    for_each_rank(num_ranks, [&](int r) {
      if (r < num_ranks) room += max(load - static_cast<Int>(plan.load[r]), Int{0});
    });
    room = warp_sum(room);
    if (lane_of() == 0) shared.is_filled[rank] = room <= static_cast<Int>(plan.all_tokens);
  }
}

// By the first warp, after mark_filled. Int holds loads, tokens and their sums over the ranks:
// int32_t when all of them are this source's own few rows, of which no other source has any.
template <typename Int>
__device__ __forceinline__ void plan_exact(const WaterfillParams& p, PlanShared& shared) {
  constexpr bool kOwn = sizeof(Int) == sizeof(int32_t);
  WaterfillPlan& plan = shared.plan;
  const int num_ranks = p.topk.num_ranks, source = p.topk.source_rank;
  const auto is_filled = [&](int r) { return r < num_ranks && shared.is_filled[r] != 0; };
  int filled = 0;
  Int sum = 0;
  for_each_rank(num_ranks, [&](int r) {
    filled += __popc(__ballot_sync(kAllLanes, is_filled(r)));
    if (is_filled(r)) sum += static_cast<Int>(plan.load[r]);
  });
  // At least the lowest rank is filled.
  const Int total = warp_sum(sum) + static_cast<Int>(plan.all_tokens);
  const bool is_small = kOwn || (total >= 0 && total <= 0x7fffffff);
  const Int level =
      is_small
          ? static_cast<Int>(static_cast<uint32_t>(total) / static_cast<uint32_t>(max(filled, 1)))
          : total / max(filled, 1);
  const Int rest = total - level * filled;

  int candidates = 0;  // filled ranks from remainder_start on
  Int away_before = 0;
  for_each_rank(num_ranks, [&](int i) {
    int r = i + p.remainder_start;
    if (r >= num_ranks) r -= num_ranks;
    const bool fills = i < num_ranks && is_filled(r);
    const unsigned same = __ballot_sync(kAllLanes, fills);
    const int place = candidates + __popc(same & ((1u << lane_of()) - 1));
    candidates += __popc(same);
    if (i >= num_ranks) return;
    const Int quota = fills ? level - static_cast<Int>(plan.load[r]) + (place < rest ? 1 : 0) : 0;
    const Int tokens = kOwn ? (r == source ? static_cast<Int>(plan.own_tokens) : 0)
                            : static_cast<Int>(tokens_of(p, r, plan.own_tokens));
    const Int stay = min(tokens, quota);
    if (!kOwn && r < source) away_before += tokens - stay;
    if (r == source) plan.stay = stay;
    plan.first[r] = quota - stay;
  });
  if (!kOwn) away_before = warp_sum(away_before);
  if (lane_of() == 0) plan.first_away = away_before;
  __syncwarp();
  if (is_small) {  // quotas are no more than all tokens
    sum_below<int32_t>(num_ranks, plan.first);
  } else {
    sum_below<int64_t>(num_ranks, plan.first);
  }
}

// By the first warp.
__device__ __forceinline__ void plan_restricted(const WaterfillParams& p, PlanShared& shared) {
  WaterfillPlan& plan = shared.plan;
  int64_t below = -plan.load[0];
  for_each_rank(p.topk.num_ranks, [&](int r) {
    if (r < p.topk.num_ranks) below = max(below, -plan.load[r]);
  });
  below = warp_max(below);
  if (lane_of() == 0) plan.lowest = -below;
}

// By the first warp.
__device__ __forceinline__ void plan_sampled(const WaterfillParams& p, PlanShared& shared) {
  WaterfillPlan& plan = shared.plan;
  const int num_ranks = p.topk.num_ranks;
  int64_t pairs = 0, sum = 0, highest = 0;
  for_each_rank(num_ranks, [&](int r) {
    if (r >= num_ranks) return;
    int64_t load = plan.load[r];
    pairs += load;
    if (p.tokens_per_rank != nullptr) load += p.tokens_per_rank[r];
    plan.load[r] = load;
    sum += load;
    highest = max(highest, load);
  });
  pairs = warp_sum(pairs);
  sum = warp_sum(sum);
  highest = warp_max(highest);
  const int64_t target = (sum + pairs / max(p.topk.top_k, 1) + num_ranks - 1) / num_ranks;
  for_each_rank(num_ranks, [&](int r) {
    if (r >= num_ranks) return;
    const int64_t room = max(target - plan.load[r], int64_t{0});
    plan.first[r] = r == p.topk.source_rank ? room : room * 10 / 11;
  });
  if (lane_of() == 0) plan.everywhere = p.global_counts == nullptr || highest <= target;
  __syncwarp();
  sum_below<int64_t>(num_ranks, plan.first);
}

// By the whole block. Given what the source itself counted, in shared memory since a barrier; the
// plan is there after the next one. kFewRows: of this call alone, no more than 2^16 pairs.
template <bool kFewRows>
__device__ __forceinline__ void make_plan(const WaterfillParams& p, const uint32_t* counts,
                                          int64_t live_rows, PlanShared& shared) {
  WaterfillPlan& plan = shared.plan;
  const int num_ranks = p.topk.num_ranks;
  for (int r = threadIdx.x; r < num_ranks; r += kWaterfillThreads) {
    plan.load[r] = p.global_counts != nullptr ? p.global_counts[r] : counts[r];
  }
  if (threadIdx.x < kWarp) {
    int64_t own = live_rows, all = live_rows;
    if (p.tokens_per_rank != nullptr) {
      int64_t tokens = 0;
      for_each_rank(num_ranks, [&](int r) { tokens += r < num_ranks ? p.tokens_per_rank[r] : 0; });
      all = max(warp_sum(tokens), int64_t{0});
      own = tokens_of(p, p.topk.source_rank, 0);
    }
    if (lane_of() == 0) {
      plan.own_tokens = own;
      plan.all_tokens = all;
    }
  }
  __syncthreads();
  if (p.mode == WaterfillMode::kExact) {
    // A sum of 64 bits over a warp takes three times as long, and this is a chain of them.
    const bool is_own = kFewRows && p.global_counts == nullptr;
    if (is_own) {
      mark_filled<int32_t>(num_ranks, shared);
    } else {
      mark_filled<int64_t>(num_ranks, shared);
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    if (is_own) {
      plan_exact<int32_t>(p, shared);
    } else {
      plan_exact<int64_t>(p, shared);
    }
    return;
  }
  if (threadIdx.x >= kWarp) return;
  if (p.mode == WaterfillMode::kRestricted) {
    plan_restricted(p, shared);
  } else {
    plan_sampled(p, shared);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
