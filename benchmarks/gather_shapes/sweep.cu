// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// gather_shapes/sweep.cu: times ways to copy each token's row to its experts, for tuning the last
// kernel of csrc/moe/permute.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I include -o sweep
//       benchmarks/gather_shapes/sweep.cu && ./sweep COMMIT > gather_shapes.json
//
// Rows of bfloat16, each token in distinct experts, rows in expert order; how they are timed,
// ../shape_sweep.cuh says. Every way must give the first one's bits.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../shape_sweep.cuh"
#include "sgl_moe_jit/moe/permute.cuh"

namespace {

using namespace sgl_moe_jit;  // NOLINT: a program of its own
using moe::PermuteParams;
using shape_sweep::Bf16;
using shape_sweep::check;

__device__ __forceinline__ void put(uint4* to, uint4 word, bool streaming) {
  if (streaming) {
    __stcs(to, word);
  } else {
    *to = word;
  }
}

// A block a token and threads * kWords words of its row. Blocks that start together have the parts
// of a row, or one part of neighbouring tokens.
template <int kThreads, int kWords, bool kStreaming, bool kTokensFirst>
__global__ void __launch_bounds__(kThreads) by_row(const PermuteParams p, int parts) {
  const int num_tokens = static_cast<int>(p.num_tokens);
  const int token = kTokensFirst ? blockIdx.x % num_tokens : blockIdx.x / parts;
  const int part = kTokensFirst ? blockIdx.x / num_tokens : blockIdx.x % parts;
  const int words = static_cast<int>(p.row_bytes / 16);
  const int first = part * kThreads * kWords + threadIdx.x;
  device::pdl_wait();
  device::pdl_launch_dependents();
  const auto* source = reinterpret_cast<const uint4*>(static_cast<const char*>(p.hidden) +
                                                      token * p.hidden_stride_bytes);
  uint4 word[kWords];
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    if (first + j * kThreads < words) word[j] = source[first + j * kThreads];
  }
  const int32_t* row_of = p.row_of + int64_t{token} * p.top_k;
  for (int k = 0; k < p.top_k; k += 4) {
    int32_t row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) row[j] = k + j < p.top_k ? row_of[k + j] : -1;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (row[j] < 0) continue;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (first + w * kThreads < words) {
          put(moe::word_at<uint4>(p, row[j], first + w * kThreads), word[w], kStreaming);
        }
      }
    }
  }
}

// A warp a part of a token's row: one bulk copy into shared memory, and one out for each slot.
__global__ void __launch_bounds__(32) bulk(const PermuteParams p, int parts) {
  extern __shared__ __align__(128) char row_part[];
  __shared__ uint64_t here;
  const int token = blockIdx.x / parts, part = blockIdx.x % parts;
  const uint32_t bytes = static_cast<uint32_t>(p.row_bytes / parts);
  const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&here));
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(row_part));
  if (threadIdx.x == 0) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(
            barrier)
        : "memory");
  }
  __syncwarp();
  device::pdl_wait();
  device::pdl_launch_dependents();
  const char* from =
      static_cast<const char*>(p.hidden) + token * p.hidden_stride_bytes + int64_t{part} * bytes;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
  }
  int32_t row = -1;
  if (static_cast<int>(threadIdx.x) < p.top_k) {
    row = p.row_of[int64_t{token} * p.top_k + threadIdx.x];
  }
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred q;\n mbarrier.try_wait.parity.shared::cta.b64 q, [%1], 0;\n"
        "selp.u32 %0, 1, 0, q; }"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  }
  if (row >= 0) {
    char* to = static_cast<char*>(p.permuted) + int64_t{row} * p.row_bytes + int64_t{part} * bytes;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}

struct Candidate {
  std::string name;
  void (*kernel)(PermuteParams, int);
  int threads;    // of a block; 0: the fewest that do for a row, as csrc/moe/permute.cu has them
  int words;      // of a thread; 0: bulk copies
  int parts = 0;  // of a row; 0: as many as it takes
  bool same_bits = true;
};

template <int kThreads, int kWords, bool kStreaming = false, bool kTokensFirst = false>
Candidate rows() {
  std::string name = std::to_string(kThreads) + " threads, " + std::to_string(kWords) + " words";
  if (kTokensFirst) name += ", tokens as neighbours";
  if (kStreaming) name += ", streaming stores";
  return {name, by_row<kThreads, kWords, kStreaming, kTokensFirst>, kThreads, kWords};
}

std::vector<Candidate> candidates() {
  return {
      {"the library's", moe::gather_kernel<uint4>, 0, moe::kGatherWords},
      rows<448, 2>(),
      rows<448, 2, true>(),
      rows<128, 1, false, true>(),
      rows<128, 1>(),
      rows<128, 1, true>(),
      rows<256, 1>(),
      rows<128, 2>(),
      rows<256, 2>(),
      rows<128, 4>(),
      rows<128, 7>(),
      {"bulk copies, a row", bulk, 32, 0, 1},
      {"bulk copies, half a row", bulk, 32, 0, 2},
      {"bulk copies, a quarter", bulk, 32, 0, 4},
  };
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

void launch(const Candidate& c, const PermuteParams& p, cudaStream_t stream) {
  const int words = static_cast<int>(p.row_bytes / 16);
  const int most = c.threads > 0 ? c.threads : moe::kGatherMaxThreads;
  const int parts = c.parts > 0 ? c.parts : divide_up(words, most * c.words);
  const int fewest = c.words > 0 ? divide_up(words, parts * c.words * 32) * 32 : 0;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.num_tokens * parts));
  config.blockDim = dim3(static_cast<unsigned>(c.threads > 0 ? c.threads : fewest));
  if (c.words == 0) config.dynamicSmemBytes = static_cast<size_t>(p.row_bytes / parts);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, c.kernel, p, parts), c.name.c_str());
}

// The row of each slot: a stable sort by expert, each token's experts distinct.
std::vector<int32_t> rows_by_expert(int num_tokens, int num_experts, int top_k) {
  std::mt19937 random(5);
  std::vector<int> experts(num_experts), of_slot;
  std::iota(experts.begin(), experts.end(), 0);
  for (int t = 0; t < num_tokens; ++t) {
    for (int k = 0; k < top_k; ++k) {
      std::swap(experts[k], experts[k + random() % (num_experts - k)]);
      of_slot.push_back(experts[k]);
    }
  }
  std::vector<int32_t> next(num_experts + 1, 0), row_of;
  for (int e : of_slot) ++next[e + 1];
  for (int e = 0; e < num_experts; ++e) next[e + 1] += next[e];
  for (int e : of_slot) row_of.push_back(next[e]++);
  return row_of;
}

const char* commit = "unknown";

void run(const char* name, int hidden, int num_experts, int num_tokens) {
  constexpr int kTopK = 8;
  const size_t slots = size_t(num_tokens) * kTopK, row_bytes = size_t(hidden) * 2;
  const size_t bytes = (num_tokens + slots) * row_bytes + slots * 4;
  const shape_sweep::Run run{"gather", name, true, num_tokens, hidden, kTopK, bytes, bytes, 1};
  const size_t copies = run.copies();
  shape_sweep::Buffers buffers;
  const Bf16* source = buffers.filled(copies * num_tokens * hidden, 1);
  auto* permuted = buffers.allocate<uint8_t>(copies * slots * row_bytes);
  auto* row_of = buffers.allocate<int32_t>(slots);
  const std::vector<int32_t> rows = rows_by_expert(num_tokens, num_experts, kTopK);
  check(cudaMemcpy(row_of, rows.data(), slots * 4, cudaMemcpyHostToDevice), "copy");
  std::vector<PermuteParams> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    PermuteParams& p = calls[i];
    p = PermuteParams{};
    p.permuted = permuted + i * slots * row_bytes;
    p.row_of = row_of;
    p.hidden = source + i * num_tokens * hidden;
    p.num_tokens = num_tokens;
    p.num_slots = static_cast<int64_t>(slots);
    p.row_bytes = p.hidden_stride_bytes = static_cast<int64_t>(row_bytes);
    p.item_bytes = 2;
    p.top_k = kTopK;
    p.num_experts = num_experts;
    p.alignment = 1;
  }
  const size_t all = copies * slots * row_bytes;
  const shape_sweep::Output written{permuted, all, all - std::min<size_t>(all, 1 << 24),
                                    std::min<size_t>(all, 1 << 24)};
  shape_sweep::time_in_turn(run, candidates(), calls, written, launch, "", commit);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) commit = argv[1];
  std::printf("[");
  for (int tokens : {256, 512, 1024, 4096, 16384}) run("deepseek-v3", 7168, 32, tokens);
  for (int tokens : {512, 4096}) run("qwen3-235b", 4096, 128, tokens);
  std::printf("\n]\n");
  return 0;
}
