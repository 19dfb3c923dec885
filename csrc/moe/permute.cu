// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute.cu: the kernels of each path of a permute call, and their launch shapes.
#include <algorithm>

#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/permute.cuh"
#include "sgl_moe_jit/moe/permute_launch.h"
#include "sgl_moe_jit/moe/permute_one_launch.cuh"

namespace sgl_moe_jit {
namespace moe {
namespace {

// One launch splits rows over blocks until there are this many a multiprocessor: more blocks keep
// more of the chip busy, and each counts all ids anew. Not swept on a device yet.
constexpr int64_t kOneLaunchBlocksPerSm = 2;

struct Caller {
  bool enable_pdl;
  cudaStream_t stream;

  template <typename... Numbers>
  cudaError_t launch(void (*kernel)(PermuteParams, Numbers...), dim3 grid, int threads,
                     const PermuteParams& p, Numbers... numbers) const {
    return host::launch_kernel(kernel, grid, static_cast<unsigned>(threads), enable_pdl, stream, p,
                               numbers...);
  }
};

dim3 grid_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The widest access, up to 16 bytes, that every row of both matrices can be cut into.
int64_t word_bytes(const PermuteParams& p, bool allow_vector) {
  const uint64_t together =
      reinterpret_cast<uintptr_t>(p.hidden) | reinterpret_cast<uintptr_t>(p.permuted) |
      static_cast<uint64_t>(p.hidden_stride_bytes) | static_cast<uint64_t>(p.row_bytes);
  int64_t bytes = allow_vector ? 16 : p.item_bytes;
  while (together % static_cast<uint64_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

// Calls body(Word{}) with that access.
template <typename Body>
cudaError_t with_word(const PermuteParams& p, bool allow_vector, const Body& body) {
  switch (word_bytes(p, allow_vector)) {
    case 16:
      return body(uint4{});
    case 8:
      return body(uint2{});
    case 4:
      return body(uint32_t{});
    default:
      return body(uint16_t{});
  }
}

int64_t blocks_of_padding(const PermuteParams& p) { return p.alignment > 1 ? p.num_experts : 0; }

template <typename Word>
cudaError_t launch_one(const PermuteParams& p, const Caller& caller) {
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t tokens = p.num_slots > 0 ? p.num_tokens : 0;
  const int64_t columns = std::max<int64_t>(1, divide_up(words, kOneLaunchThreads));
  const int64_t enough = std::max<int64_t>(1, kOneLaunchBlocksPerSm * host::sm_count());
  const int64_t words_a_thread = std::max<int64_t>(1, tokens * columns / enough);
  const int64_t padded = tokens > 0 ? blocks_of_padding(p) : 0;
  return caller.launch(one_launch_kernel<Word>,
                       grid_of(1 + padded + tokens, divide_up(columns, words_a_thread)),
                       kOneLaunchThreads, p);
}

cudaError_t launch_index(const PermuteParams& p, const Caller& caller) {
  const int warps = warps_that_fit(p.num_experts, kIndexMaxWarps);
  return caller.launch(index_kernel, grid_of(1), warps * kWarp, p);
}

cudaError_t launch_count_scan_rank(const PermuteParams& p, const Caller& caller) {
  const int warps = warps_that_fit(p.num_experts, kChunkMaxWarps);
  const dim3 chunks = grid_of(divide_up(p.num_chunks, warps));
  cudaError_t status = caller.launch(count_kernel, chunks, warps * kWarp, p);
  if (status != cudaSuccess) return status;
  status = caller.launch(scan_kernel, grid_of(p.num_experts), kScanThreads, p);
  if (status != cudaSuccess) return status;
  return caller.launch(rank_kernel, chunks, warps * kWarp, p);
}

// Blocks of equal parts of a row. H200, 2026-11-30, hidden 7168, top 8, cold,
// benchmarks/results/gather_shapes.json: 18.3 us for 512 tokens in blocks of 448 threads and two
// words, 19.1 in blocks of 128 and one word with tokens as neighbours; 140.8 and 143.6 for 4096.
template <typename Word>
cudaError_t launch_gather(const PermuteParams& p, const Caller& caller) {
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t parts = divide_up(words, kGatherWords * int64_t{kGatherMaxThreads});
  const int64_t threads = divide_up(words, kGatherWords * parts * kWarp) * kWarp;
  // Below 2^31 blocks: rows of several parts have 2 KB or more each.
  return caller.launch(gather_kernel<Word>, grid_of((blocks_of_padding(p) + p.num_tokens) * parts),
                       static_cast<int>(threads), p, static_cast<int>(parts));
}

}  // namespace

cudaError_t launch_permute(const PermuteParams& p, PermutePath path, bool enable_pdl,
                           bool allow_vector, cudaStream_t stream) {
  const Caller caller{enable_pdl, stream};
  if (path == PermutePath::kOneLaunch) {
    return with_word(p, allow_vector,
                     [&](auto word) { return launch_one<decltype(word)>(p, caller); });
  }
  const cudaError_t status = path == PermutePath::kTwoLaunches ? launch_index(p, caller)
                                                               : launch_count_scan_rank(p, caller);
  if (status != cudaSuccess || p.num_slots == 0 || p.row_bytes == 0) return status;
  return with_word(p, allow_vector,
                   [&](auto word) { return launch_gather<decltype(word)>(p, caller); });
}

}  // namespace moe
}  // namespace sgl_moe_jit
