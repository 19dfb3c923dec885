// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute.cuh: each token's row copied once for every expert it goes to. Device code only.
//
// A stable counting sort of the slots by expert, then one gather.
//
//   few slots:   the one kernel of moe/permute_one_launch.cuh
//   more:        index_kernel (count, scan and rank in one block)          -> gather_kernel
//   many slots:  count_kernel -> scan_kernel (a block an expert) -> rank_kernel -> gather_kernel
//
// Cost, T tokens, K' <= K rows a token, H hidden, A bytes an element, I bytes an id:
//   bytes = A * H * (T * (1 + K') + padding) + T * K * (2 I + 8) [+ 12 E * chunks]         flops =
//   0
// The gather is the memory's speed; below a few hundred tokens it is the latency of the launches.
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/permute_slots.cuh"

namespace sgl_moe_jit {
namespace moe {

constexpr int kIndexMaxWarps = 16;
constexpr int kChunkMaxWarps = 8;  // 8 counters of 4 bytes: one 32-byte sector of scratch
constexpr int kScanThreads = 256;
constexpr int kGatherMaxThreads = 512;
constexpr int kGatherWords = 2;  // of a row in a thread's registers
// 44 KB of the 48 KB a block has without asking for more; the block scan takes its share besides.
constexpr int kSharedCounters = 11264;
static_assert(kSharedCounters >= kMaxExperts, "one warp's counters must fit");

__host__ __device__ inline int warps_that_fit(int num_experts, int max_warps) {
  const int fit = kSharedCounters / num_experts;
  return fit < max_warps ? fit : max_warps;
}

// One block: row_of and expert_offsets of all slots, and counts when asked for. Also right for zero
// slots.
__global__ void __launch_bounds__(kIndexMaxWarps* kWarp) index_kernel(const PermuteParams p) {
  __shared__ int32_t counters[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  int32_t* mine = counters + warp * p.num_experts;
  const int64_t chunk = chunk_size(p.num_slots, num_warps);
  const int64_t begin = min(p.num_slots, warp * chunk), end = min(p.num_slots, begin + chunk);
  clear(counters, num_warps * p.num_experts);
  __syncthreads();

  // A predecessor wrote the ids, and may still read what the outputs' memory held before.
  device::pdl_wait();
  device::pdl_launch_dependents();

  count_slots(p, begin, end, mine);
  __syncthreads();
  place_experts(
      p,
      [&](int e) {
        int32_t count = 0;
        for (int w = 0; w < num_warps; ++w) count += counters[w * p.num_experts + e];
        return count;
      },
      [&](int e, int32_t first_row) {
        int32_t row = first_row;
        for (int w = 0; w < num_warps; ++w) {
          const int32_t count = counters[w * p.num_experts + e];
          counters[w * p.num_experts + e] = row;
          row += count;
        }
        if (p.counts != nullptr) p.counts[e] = row - first_row;
        return row - first_row;
      });
  __syncthreads();
  rank_slots(p, begin, end, mine);
}

// A chunk a warp: scratch[e, chunk] = its slots of expert e.
__global__ void __launch_bounds__(kChunkMaxWarps* kWarp) count_kernel(const PermuteParams p) {
  __shared__ int32_t counters[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const int first_chunk = blockIdx.x * num_warps;
  const int64_t chunk = chunk_size(p.num_slots, p.num_chunks);
  const int64_t begin = min(p.num_slots, (first_chunk + warp) * chunk);
  clear(counters, num_warps * p.num_experts);
  __syncthreads();
  device::pdl_wait();
  device::pdl_launch_dependents();
  count_slots(p, begin, min(p.num_slots, begin + chunk), counters + warp * p.num_experts);
  __syncthreads();
  for (int i = threadIdx.x; i < num_warps * p.num_experts; i += blockDim.x) {
    const int e = i / num_warps, w = i % num_warps;
    if (first_chunk + w < p.num_chunks) {
      p.scratch[int64_t{e} * p.num_chunks + first_chunk + w] = counters[w * p.num_experts + e];
    }
  }
}

// A block an expert: its counts in the chunks become exclusive prefix sums, their total its count.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const PermuteParams p) {
  int32_t* counts = p.scratch + int64_t{blockIdx.x} * p.num_chunks;
  const int per_thread = (p.num_chunks + kScanThreads - 1) / kScanThreads;
  const int first = min(p.num_chunks, static_cast<int>(threadIdx.x) * per_thread);
  const int last = min(p.num_chunks, first + per_thread);
  device::pdl_wait();
  device::pdl_launch_dependents();
  int32_t sum = 0;
  for (int c = first; c < last; ++c) sum += counts[c];
  int32_t base = block_exclusive_scan(sum);
  for (int c = first; c < last; ++c) {
    const int32_t count = counts[c];
    counts[c] = base;
    base += count;
  }
  if (threadIdx.x == kScanThreads - 1) p.counts[blockIdx.x] = base;
}

// A chunk a warp, as in count_kernel: row_of of its slots; block 0 writes expert_offsets.
__global__ void __launch_bounds__(kChunkMaxWarps* kWarp) rank_kernel(const PermuteParams p) {
  __shared__ int32_t next[kSharedCounters];
  const int num_warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
  const int first_chunk = blockIdx.x * num_warps;
  const int64_t chunk = chunk_size(p.num_slots, p.num_chunks);
  const int64_t begin = min(p.num_slots, (first_chunk + warp) * chunk);
  device::pdl_wait();
  device::pdl_launch_dependents();
  const auto count_of = [&](int e) { return p.counts[e]; };
  place_experts(p, count_of, [&](int e, int32_t first_row) {
    for (int w = 0; w < num_warps; ++w) {
      if (first_chunk + w >= p.num_chunks) break;
      next[w * p.num_experts + e] =
          first_row + p.scratch[int64_t{e} * p.num_chunks + first_chunk + w];
    }
    return count_of(e);
  });
  __syncthreads();
  rank_slots(p, begin, min(p.num_slots, begin + chunk), next + warp * p.num_experts);
}

// Calls body(word_number, column) for each of a thread's words that is in the row.
template <typename Body>
__device__ __forceinline__ void for_each_column(int64_t first, int64_t words, const Body& body) {
#pragma unroll
  for (int w = 0; w < kGatherWords; ++w) {
    const int64_t column = first + w * static_cast<int64_t>(blockDim.x);
    if (column < words) body(w, column);
  }
}

// A block a token and a part of its row: read once, stored for each of its slots. The parts of a
// row are neighbours, so that blocks that run together write whole rows. With an alignment, the
// blocks of num_experts rows ahead of the tokens' clear an expert's padding each; ahead, because
// they have the most rows to write.
template <typename Word>
__global__ void __launch_bounds__(kGatherMaxThreads)
    gather_kernel(const PermuteParams p, int parts) {
  constexpr int kSlotsAhead = 4;
  const int in_order = static_cast<int>(blockIdx.x) / parts;
  const int part = static_cast<int>(blockIdx.x) - in_order * parts;
  const int64_t first = part * (int64_t{kGatherWords} * blockDim.x) + threadIdx.x;
  const int64_t words = words_of_row<Word>(p);
  int64_t token = in_order;
  device::pdl_wait();
  device::pdl_launch_dependents();
  if (p.alignment > 1) {
    const int e = in_order;
    if (e < p.num_experts) {
      const int32_t filled = (e > 0 ? p.expert_offsets[e - 1] : 0) + p.counts[e];
      const int32_t end = p.expert_offsets[e];
      return for_each_column(
          first, words, [&](int, int64_t column) { clear_rows<Word>(p, filled, end, column); });
    }
    token -= p.num_experts;
  }
  const auto* source = reinterpret_cast<const Word*>(static_cast<const char*>(p.hidden) +
                                                     token * p.hidden_stride_bytes);
  Word word[kGatherWords];
  for_each_column(first, words, [&](int w, int64_t column) { word[w] = source[column]; });
  const int32_t* row_of = p.row_of + token * p.top_k;
  for (int k = 0; k < p.top_k; k += kSlotsAhead) {
    int32_t row[kSlotsAhead];
#pragma unroll
    for (int j = 0; j < kSlotsAhead; ++j) row[j] = k + j < p.top_k ? row_of[k + j] : -1;
#pragma unroll
    for (int j = 0; j < kSlotsAhead; ++j) {
      if (row[j] < 0) continue;
      for_each_column(first, words,
                      [&](int w, int64_t column) { *word_at<Word>(p, row[j], column) = word[w]; });
    }
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
