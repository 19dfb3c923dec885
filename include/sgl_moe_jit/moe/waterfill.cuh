// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill.cuh: the waterfill kernels. Device code only. Rules: moe/waterfill_params.h.
//
// One block: read the ids, write the routed columns and count; plan; write the shared column.
// Many: count a chunk of rows a block; plan in one block; then a chunk a block again.
//
// A decode batch is all latency: two trips to memory (the count of rows beside the ids), the
// counters, and a plan of some dependent steps. Sums of integers, so that no order shows.
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/waterfill_plan.cuh"

namespace sgl_moe_jit {
namespace moe {

// Ids a thread loads before it uses the first.
constexpr int kIdsAhead = 4;
constexpr int kMaxRankWords = kMaxRanks / kWarp;

struct RowsShared {
  PlanShared plan;
  uint32_t counts[kMaxRanks];
  uint32_t live_bytes[kOneBlockRows / 4];       // a byte a row: 1 if it is live
  uint32_t live_before[kOneBlockRows / kWarp];  // live rows before each 32
  uint32_t live_rows;
  // kRestricted
  uint32_t taken[kMaxRanks];                   // by rows with one candidate
  uint32_t masks[kChunkRows * kMaxRankWords];  // a bit a candidate, W bits a row in whole words
  uint32_t open[kChunkRows / kWarp];           // a bit a row with more than one
  uint16_t chosen[kChunkRows];
};

__device__ __forceinline__ int rank_words(const EpTopkParams& p) {
  return (p.num_ranks + kWarp - 1) / kWarp;
}

__device__ __forceinline__ bool is_live_row(const RowsShared& shared, int row) {
  return reinterpret_cast<const uint8_t*>(shared.live_bytes)[row] != 0;
}

// Before the wait for predecessors.
__device__ __forceinline__ void clear_rows(const WaterfillParams& p, int num_rows,
                                           RowsShared& shared) {
  for (int i = threadIdx.x; i < p.topk.num_ranks; i += kWaterfillThreads) {
    shared.counts[i] = 0;
    shared.taken[i] = 0;
  }
  for (int i = threadIdx.x; i < kOneBlockRows / 4; i += kWaterfillThreads) shared.live_bytes[i] = 0;
  if (p.mode == WaterfillMode::kRestricted) {
    const int words = num_rows * rank_words(p.topk);
    for (int i = threadIdx.x; i < words; i += kWaterfillThreads) shared.masks[i] = 0;
  }
}

// Marks the live rows of some rows and counts the pairs of each rank; kWrite: writes the routed
// columns too, and notes the candidates of kRestricted.
template <typename Id, typename Weight, bool kWrite>
__device__ __forceinline__ void read_rows(const WaterfillParams& p, uint32_t first_row,
                                          uint32_t num_rows, RowsShared& shared) {
  const EpTopkParams& topk = p.topk;
  const uint32_t top_k = static_cast<uint32_t>(topk.top_k), num_ids = num_rows * top_k;
  if (num_ids == 0) return;
  const Id* ids = static_cast<const Id*>(topk.topk_ids) + first_row * top_k;
  const Weight* weights = static_cast<const Weight*>(topk.topk_weights) + first_row * top_k;
  const bool note = kWrite && p.mode == WaterfillMode::kRestricted;
  const uint32_t words = static_cast<uint32_t>(rank_words(topk));
  int64_t valid = 0;
  for (uint32_t base = threadIdx.x; base < num_ids; base += kIdsAhead * kWaterfillThreads) {
    Id id[kIdsAhead];
    Weight weight[kIdsAhead];
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) {
      const uint32_t slot = min(base + j * kWaterfillThreads, num_ids - 1);
      id[j] = ids[slot];
      if (kWrite) weight[j] = weights[slot];
    }
    if (base == threadIdx.x) valid = num_valid_rows(topk) - first_row;  // beside the first ids
#pragma unroll
    for (int j = 0; j < kIdsAhead; ++j) {
      const uint32_t slot = base + j * kWaterfillThreads;
      if (slot >= num_ids) break;
      const uint32_t row = divide(slot, p.by_top_k);
      const Id routed = row < valid ? id[j] : Id{-1};
      if (routed >= 0) {
        const uint32_t rank = static_cast<uint32_t>(owner_of(topk, routed));
        atomicAdd(shared.counts + rank, 1u);
        reinterpret_cast<uint8_t*>(shared.live_bytes)[row] = 1;
        if (note) atomicOr(shared.masks + row * words + rank / kWarp, 1u << (rank % kWarp));
      }
      if (kWrite) {
        const uint32_t item = first_row * (top_k + 1) + slot + row;
        static_cast<Id*>(topk.out_ids)[item] = sent_id(topk, routed);
        static_cast<Weight*>(topk.out_weights)[item] = routed >= 0 ? weight[j] : Weight{0};
      }
    }
  }
}

// A lane's share of the block's live rows: of 32 rows, by any whole warp.
__device__ __forceinline__ uint32_t live_rows_of_lane(const RowsShared& shared) {
  static_assert(kOneBlockRows == kWarp * kWarp, "a lane counts 32 rows");
  const uint32_t* bytes = shared.live_bytes + lane_of() * (kWarp / 4);
  uint32_t live = 0;
#pragma unroll
  for (int i = 0; i < kWarp / 4; ++i) live += static_cast<uint32_t>(__popc(bytes[i]));
  return live;
}

// By one warp: live rows before each 32, and all of them.
__device__ __forceinline__ uint32_t scan_live_rows(RowsShared& shared) {
  const uint32_t live = live_rows_of_lane(shared), inclusive = warp_inclusive_scan(live);
  shared.live_before[lane_of()] = inclusive - live;
  if (lane_of() == kWarp - 1) shared.live_rows = inclusive;
  return __shfl_sync(kAllLanes, inclusive, kWarp - 1);
}

// By the first warp: the rows with a choice, one after another, each to the lowest of its ranks.
// kWords words of 32 ranks; a lane keeps the keys of one rank of each. Keys differ by their ties.
template <int kWords>
__device__ __forceinline__ void choose_in_turn(const WaterfillParams& p, int32_t chunk,
                                               int32_t turn, RowsShared& shared) {
  const int num_ranks = p.topk.num_ranks, words = rank_words(p.topk);
  uint32_t keys[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int rank = w * kWarp + lane_of();
    keys[w] = 0xffffffffu;
    if (rank < num_ranks) {
      uint32_t height =
          restricted_height(shared.plan.plan, p.topk.source_rank, chunk, rank, shared.live_rows);
      height += shared.taken[rank] * kTokenHeight;
      keys[w] = height << kTieBits | static_cast<uint32_t>(restricted_tie(rank, turn, num_ranks));
    }
  }
  int group = 0;
  uint32_t open = shared.open[0];
  const auto next_row = [&] {
    while (open == 0 && ++group < kChunkRows / kWarp) open = shared.open[group];
    if (open == 0) return -1;
    const int row = group * kWarp + __ffs(static_cast<int>(open)) - 1;
    open &= open - 1;
    return row;
  };
  uint32_t masks[kWords];
  const auto load_masks = [&](int row) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      masks[w] = row >= 0 && w < words ? shared.masks[row * words + w] : 0;
    }
  };
  int row = next_row();
  load_masks(row);
#pragma unroll 1
  while (row >= 0) {
    uint32_t mine[kWords], lowest = 0xffffffffu;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      mine[w] = (masks[w] >> lane_of() & 1u) != 0 ? keys[w] : 0xffffffffu;
      lowest = min(lowest, mine[w]);
    }
    // The next row's masks come while the lanes agree: keys alone depend on the row before.
    const int next = next_row();
    load_masks(next);
    lowest = __reduce_min_sync(kAllLanes, lowest);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (mine[w] == lowest) keys[w] += kTokenHeight << kTieBits;
    }
    if (lane_of() == 0) {
      int rank = static_cast<int>(lowest & ((1u << kTieBits) - 1)) + turn;
      if (rank >= num_ranks) rank -= num_ranks;
      shared.chosen[row] = static_cast<uint16_t>(rank);
    }
    row = next;
  }
}

// By the whole block, a barrier after its rows are read and scanned and the plan is there. Ranks
// are there after the next one.
__device__ __forceinline__ void choose_restricted(const WaterfillParams& p, int32_t chunk,
                                                  RowsShared& shared) {
  const int words = rank_words(p.topk), row = static_cast<int>(threadIdx.x);
  if (row < kChunkRows) {
    int candidates = 0, rank = 0;
    if (is_live_row(shared, row)) {  // never at or above the rows there are
      for (int w = 0; w < words; ++w) {
        const uint32_t mask = shared.masks[row * words + w];
        candidates += __popc(mask);
        if (mask != 0) rank = w * kWarp + __ffs(static_cast<int>(mask)) - 1;
      }
    }
    if (candidates == 1) {
      atomicAdd(shared.taken + rank, 1u);
      shared.chosen[row] = static_cast<uint16_t>(rank);
    }
    const unsigned open = __ballot_sync(kAllLanes, candidates > 1);
    if (lane_of() == 0) shared.open[row / kWarp] = open;
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const int32_t turn = restricted_turn(p.topk.source_rank, chunk, p.topk.num_ranks);
  if (words == 1) {
    choose_in_turn<1>(p, chunk, turn, shared);
  } else if (words <= 4) {
    choose_in_turn<4>(p, chunk, turn, shared);
  } else {
    choose_in_turn<kMaxRankWords>(p, chunk, turn, shared);
  }
}

// By the whole block, after a barrier. tokens_before: live rows of the source before first_row.
template <typename Id, typename Weight>
__device__ __forceinline__ void write_shared_column(const WaterfillParams& p, uint32_t first_row,
                                                    uint32_t num_rows, int64_t tokens_before,
                                                    RowsShared& shared) {
  const EpTopkParams& topk = p.topk;
  const WaterfillPlan& plan = shared.plan.plan;
  const unsigned lanes_before = (1u << lane_of()) - 1;
  // Whole warps, so that all lanes vote.
  for (uint32_t row = threadIdx.x; row - lane_of() < num_rows; row += kWaterfillThreads) {
    const bool live = row < num_rows && is_live_row(shared, static_cast<int>(row));
    const unsigned votes = __ballot_sync(kAllLanes, live);
    Id id = -1;
    Weight weight = 0;
    if (live) {
      int32_t rank;
      if (p.mode == WaterfillMode::kExact) {
        const int64_t place = shared.live_before[row / kWarp] + __popc(votes & lanes_before);
        rank = exact_rank(plan, topk.source_rank, topk.num_ranks, tokens_before + place);
      } else if (p.mode == WaterfillMode::kRestricted) {
        rank = shared.chosen[row];
      } else {
        rank = sampled_rank<Id>(plan, topk, int64_t{first_row} + row);
      }
      id = static_cast<Id>(shared_slot(topk, rank));
      weight = static_cast<Weight>(topk.shared_weight);
    }
    if (row < num_rows) {
      const uint32_t top_k = static_cast<uint32_t>(topk.top_k);
      const uint32_t item = (first_row + row) * (top_k + 1) + top_k;
      static_cast<Id*>(topk.out_ids)[item] = id;
      static_cast<Weight*>(topk.out_weights)[item] = weight;
    }
  }
}

template <typename Id, typename Weight>
__global__ void __launch_bounds__(kWaterfillThreads)
    waterfill_one_block_kernel(const WaterfillParams p) {
  __shared__ RowsShared shared;
  const uint32_t num_rows = static_cast<uint32_t>(p.topk.num_tokens);
  clear_rows(p, static_cast<int>(num_rows), shared);
  __syncthreads();
  // Ids, weights and counts are a predecessor's, and it may still read what the outputs' memory
  // held before.
  device::pdl_wait();
  device::pdl_launch_dependents();
  read_rows<Id, Weight, true>(p, 0, num_rows, shared);
  __syncthreads();
  // The first warp needs their number at once; what is before each of them, nobody before the plan.
  uint32_t live_rows = 0;
  if (threadIdx.x < kWarp) live_rows = __reduce_add_sync(kAllLanes, live_rows_of_lane(shared));
  make_plan<true>(p, shared.counts, live_rows, shared.plan);
  if (threadIdx.x / kWarp == 1) scan_live_rows(shared);
  __syncthreads();
  if (p.mode == WaterfillMode::kRestricted) {
    choose_restricted(p, 0, shared);
    __syncthreads();
  }
  write_shared_column<Id, Weight>(p, 0, num_rows, 0, shared);
}

}  // namespace moe
}  // namespace sgl_moe_jit
