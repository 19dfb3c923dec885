// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_params.h: one waterfill call, and how a token picks the rank of its shared expert.
//
// load[r]: (token, expert) pairs on rank r.  M: tokens, each of which adds 1 to the rank it picks.
//   kExact       quota[r]: what rank r gets when M tokens are poured on the lowest loads. As many
//   as
//                the home rank's quota holds stay there; the others are dealt out by halves: of the
//                tokens that reach a span of ranks, its two halves get theirs in an even mix.
//   kRestricted  each token to the lowest of the ranks it goes to anyway, one after another, over
//                chunks of rows; see restricted_height.
//   kSampled     a hash of the row picks a rank with a chance by its deficit (sglang 0.5.23's
//   rule).
// Integers only: the same on CUDA and CPU. All of it holds for any numbers in the caller's counts:
// wrong ones give an unlevel choice, never one that is no rank.
#pragma once

#include "sgl_moe_jit/moe/ep_topk_params.h"

namespace sgl_moe_jit {
namespace moe {

// As numbered in ops/waterfill_kernel.py.
enum class WaterfillMode : int { kExact = 0, kRestricted = 1, kSampled = 2 };

// Rows that pick one after another in kRestricted, and rows a block where there are many blocks.
constexpr int kChunkRows = 256;
// Rows and ids that one block alone takes: what it keeps in shared memory, and what is worth it.
constexpr int kOneBlockRows = 1024;
constexpr int64_t kOneBlockIds = 8192;

struct WaterfillParams {
  EpTopkParams topk;               // S = 1
  const int64_t* global_counts;    // [W] pairs of all sources; nullptr: only this source's count
  const int64_t* tokens_per_rank;  // [W] tokens of each source; nullptr likewise
  int64_t* plan;                   // a WaterfillPlan, between kernels
  int32_t* chunk_counts;           // [chunks, W + 1] pairs a rank, then live rows; likewise
  Divisor by_top_k;                // by K, slots of a block's rows
  WaterfillMode mode;
  int32_t remainder_start;  // first rank to get one of the tokens that do not divide
};

// What every token needs to pick its rank. Numbers alone, so that it travels as an array.
struct WaterfillPlan {
  int64_t own_tokens;  // M of this source
  int64_t all_tokens;  // M
  int64_t stay;        // kExact: how many of this source stay home
  int64_t first_away;  // kExact: place of this source's first other token among all those
  int64_t lowest;      // kRestricted: the least load
  int64_t everywhere;  // kSampled: whether all ranks may be picked
  int64_t load[kMaxRanks];
  // kExact: quotas of lower ranks without who stays home; kSampled: weights of lower ranks
  int64_t first[kMaxRanks + 1];
};

// The rank of token i of own_tokens, by quotas. Unsigned holds the square of the tokens.
template <typename Unsigned>
SMJ_HOST_DEVICE inline int32_t exact_rank(const WaterfillPlan& plan, int32_t home,
                                          int32_t num_ranks, Unsigned i) {
  const auto all_away = static_cast<Unsigned>(plan.first[num_ranks]);
  const auto own = static_cast<Unsigned>(plan.own_tokens);
  const auto stay = static_cast<Unsigned>(plan.stay);
  if (own == 0 || all_away == 0) return home;
  i = i < own ? i : own - 1;
  // Of i tokens i * stay / own stay. One more would, if this one does.
  const Unsigned stayed = i * stay / own;
  if (i * stay - stayed * own + stay >= own) return home;
  Unsigned place = static_cast<Unsigned>(plan.first_away) + i - stayed, total = all_away;
  place = place < total ? place : total - 1;
  int32_t low = 0, size = 1;
  while (size < num_ranks) size *= 2;
  for (size /= 2; size > 0 && total > 0; size /= 2) {
    const int32_t middle = low + size < num_ranks ? low + size : num_ranks;
    const auto left = static_cast<Unsigned>(plan.first[middle] - plan.first[low]);
    const Unsigned to_left = place * left / total;
    if (place * left - to_left * total + left >= total) {
      place = to_left;
      total = left;
    } else {
      place -= to_left;
      total -= left;
      low = middle;
    }
  }
  return low < num_ranks ? low : num_ranks - 1;
}

SMJ_HOST_DEVICE inline int32_t exact_rank(const WaterfillPlan& plan, int32_t home,
                                          int32_t num_ranks, int64_t i) {
  const bool is_small = plan.first[num_ranks] <= 0xffff && plan.own_tokens <= 0xffff;
  return is_small ? exact_rank(plan, home, num_ranks, static_cast<uint32_t>(i))
                  : exact_rank(plan, home, num_ranks, static_cast<uint64_t>(i));
}

// Heights of kRestricted: a token weighs kTokenHeight. A rank's height stands above its
// tie-breaker, which has room for kMaxRanks: 22 bits of load, 16 of tokens, and a carry, above 9.
constexpr uint32_t kTokenHeight = 256;
constexpr uint32_t kTieBits = 9;
constexpr uint32_t kMostHeight = 1u << 22;

// What a rank's load is in the eyes of a chunk of some tokens, which stands for all of them: n of M
// tokens see n / M of the load. Unless the chunk is all there is, up to one token more, differently
// in each chunk: else all of them would round alike.
SMJ_HOST_DEVICE inline uint32_t restricted_height(const WaterfillPlan& plan, int32_t source,
                                                  int32_t chunk, int32_t rank, int64_t tokens) {
  const auto above = static_cast<uint64_t>(plan.load[rank] - plan.lowest);
  const uint64_t all = plan.all_tokens > 0 ? static_cast<uint64_t>(plan.all_tokens) : 1;
  const uint64_t share = above * static_cast<uint64_t>(tokens) * kTokenHeight / all;
  uint32_t height = share < kMostHeight ? static_cast<uint32_t>(share) : kMostHeight;
  if (tokens != plan.all_tokens) {
    const uint32_t place = static_cast<uint32_t>(source) * 4096u + static_cast<uint32_t>(chunk);
    height += (static_cast<uint32_t>(rank) * 0x9E3779B9u + place * 0x85EBCA6Bu) >> 24;
  }
  return height;
}

// Tie-breaker of a rank: its place in an order that starts elsewhere for each source and chunk.
SMJ_HOST_DEVICE inline int32_t restricted_turn(int32_t source, int32_t chunk, int32_t num_ranks) {
  return static_cast<int32_t>((static_cast<uint32_t>(source) + static_cast<uint32_t>(chunk)) %
                              static_cast<uint32_t>(num_ranks));
}
SMJ_HOST_DEVICE inline int32_t restricted_tie(int32_t rank, int32_t turn, int32_t num_ranks) {
  return rank >= turn ? rank - turn : rank - turn + num_ranks;
}

SMJ_HOST_DEVICE inline uint32_t sampled_hash(int64_t row, int32_t source) {
  const uint32_t mixed = static_cast<uint32_t>(row) ^ (static_cast<uint32_t>(source) * 0x9E3779B9u);
  return mixed * 1664525u + 1013904223u;
}

SMJ_HOST_DEVICE inline int64_t sampled_weight(const WaterfillPlan& plan, int32_t rank) {
  return plan.first[rank + 1] - plan.first[rank];
}

SMJ_HOST_DEVICE inline bool is_much_lower(const WaterfillPlan& plan, int32_t rank, int32_t than) {
  return plan.load[rank] * 11 < plan.load[than] * 10;
}

// The candidate whose interval of the weights, ascending, holds the draw; the ranks of a row's ids
// and its home are the candidates, or all ranks.
template <typename Id>
SMJ_HOST_DEVICE inline int32_t sampled_rank(const WaterfillPlan& plan, const EpTopkParams& p,
                                            int64_t row) {
  const Id* ids = static_cast<const Id*>(p.topk_ids) + row * p.top_k;
  const int32_t home = p.source_rank;
  const uint32_t hash = sampled_hash(row, home);
  int32_t chosen = home;
  if (plan.everywhere) {
    const int64_t total = plan.first[p.num_ranks];
    if (total <= 0) {
      for (int32_t r = 0; r < p.num_ranks; ++r)
        chosen = is_much_lower(plan, r, chosen) ? r : chosen;
      return chosen;
    }
    const int64_t draw = static_cast<int64_t>(hash % static_cast<uint64_t>(total));
    int32_t low = 0, high = p.num_ranks - 1;  // the first rank whose end is above the draw
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (draw < plan.first[middle + 1]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
  // The candidates in ascending order, each once, without memory for them.
  const auto next_after = [&](int32_t rank) {
    int32_t next = home > rank ? home : p.num_ranks;
    for (int k = 0; k < p.top_k; ++k) {
      const int32_t owner = ids[k] >= 0 ? owner_of(p, ids[k]) : -1;
      if (owner > rank && owner < next) next = owner;
    }
    return next;
  };
  int64_t total = 0;
  for (int32_t r = next_after(-1); r < p.num_ranks; r = next_after(r)) {
    total += sampled_weight(plan, r);
  }
  if (total <= 0) {
    for (int k = 0; k < p.top_k; ++k) {
      const int32_t owner = ids[k] >= 0 ? owner_of(p, ids[k]) : chosen;
      if (is_much_lower(plan, owner, chosen)) chosen = owner;
    }
    return chosen;
  }
  int64_t draw = static_cast<int64_t>(hash % static_cast<uint64_t>(total));
  for (int32_t r = next_after(-1); r < p.num_ranks; r = next_after(r)) {
    if (draw < sampled_weight(plan, r)) return r;
    draw -= sampled_weight(plan, r);
  }
  return chosen;
}

}  // namespace moe
}  // namespace sgl_moe_jit
