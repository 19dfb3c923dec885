// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// finalize_shapes/sweep.cu: times the finalize kernel in launch shapes of one's choice, for tuning
// csrc/moe/finalize.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I include -o sweep \
//       benchmarks/finalize_shapes/sweep.cu && ./sweep COMMIT > shapes.json
//
// bfloat16 rows, float32 weights, PDL; how they are timed, ../shape_sweep.cuh says. Every shape
// must give the first one's bits. `stream` reads the same rows in the same order without indices
// and weights, `stream in a row` neighbouring ones: what memory alone allows.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../shape_sweep.cuh"
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"

namespace {

using namespace sgl_moe_jit;  // NOLINT: a program of its own
using shape_sweep::Bf16;
using shape_sweep::check;

__global__ void empty_kernel(const moe::FinalizeParams) {
  device::pdl_wait();
  device::pdl_launch_dependents();
}

// Row of slot i: a fixed permutation of the pool, computed, or i itself.
template <bool kRandom>
__host__ __device__ uint32_t stream_row(uint64_t i, uint32_t num_rows) {
  return kRandom ? static_cast<uint32_t>(i * 2654435761u + 12345u) & (num_rows - 1)
                 : static_cast<uint32_t>(i % num_rows);
}

template <int kTopK, bool kRandom>
__global__ void __launch_bounds__(128) stream_kernel(const moe::FinalizeParams p) {
  constexpr int kVec = 8;
  const int64_t token = blockIdx.y;
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kVec;
  if (column >= p.hidden_dim) return;
  device::pdl_wait();
  device::pdl_launch_dependents();
  device::Vector<Bf16, kVec> rows[kTopK + 1];
  rows[kTopK] = device::load<Bf16, kVec>(static_cast<const Bf16*>(p.shared) +
                                         token * p.shared_stride + column);
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const uint64_t row = stream_row<kRandom>(token * kTopK + k, static_cast<uint32_t>(p.num_rows));
    rows[k] = device::load<Bf16, kVec>(static_cast<const Bf16*>(p.gemm2_out) +
                                       row * p.gemm2_stride + column);
  }
  float sum[kVec] = {};
#pragma unroll
  for (int k = 0; k <= kTopK; ++k) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += rows[k].as_float(i);
  }
  device::store(static_cast<Bf16*>(p.out) + token * p.out_stride + column,
                device::pack<Bf16, kVec>(sum));
}

struct Candidate {
  std::string name;
  void (*kernel)(moe::FinalizeParams);
  int values, max_threads;  // 0 values: one block, no work
  bool even, same_bits;
};

template <int kTopK, int kBytes, int kThreads, int kMinBlocks, int kRows>
Candidate shape(bool even) {
  using Shape = moe::FinalizeShape<kBytes / 2, kThreads, kMinBlocks, kRows>;
  const std::string name = std::to_string(kBytes) + " bytes, " + std::to_string(kThreads) +
                           " threads, " + std::to_string(kMinBlocks) + " blocks, " +
                           std::to_string(kRows) + " rows";
  return {name, moe::finalize_kernel<Bf16, float, kTopK, false, Shape>, kBytes / 2, kThreads, even,
          true};
}

template <int kTopK>
std::vector<Candidate> candidates() {
  constexpr int kWide = kTopK > 10 ? kTopK / 2 : kTopK;
  return {
      shape<kTopK, 4, 128, 8, kTopK>(false),   // Tiny
      shape<kTopK, 8, 448, 2, kTopK>(true),    // Small
      shape<kTopK, 16, 448, 2, kWide>(true),   // Middle
      shape<kTopK, 16, 128, 8, kWide>(false),  // Large
      shape<kTopK, 4, 256, 4, kTopK>(false),
      shape<kTopK, 8, 128, 8, kTopK>(false),
      shape<kTopK, 8, 448, 2, kTopK>(true),
      shape<kTopK, 16, 64, 16, kWide>(false),
      shape<kTopK, 16, 256, 4, kWide>(false),
      {"empty kernel", empty_kernel, 0, 32, false, false},
      {"stream", stream_kernel<kTopK, true>, 8, 128, false, false},
      {"stream in a row", stream_kernel<kTopK, false>, 8, 128, false, false},
  };
}

void launch(const Candidate& c, const moe::FinalizeParams& p, cudaStream_t stream) {
  dim3 grid(1);
  int threads = c.max_threads;
  if (c.values > 0) {
    const int vectors = (p.hidden_dim + c.values - 1) / c.values;
    const int blocks = (vectors + threads - 1) / threads;
    if (c.even) threads = ((vectors + blocks - 1) / blocks + 31) / 32 * 32;
    grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.num_tokens));
  }
  check(host::launch_kernel(c.kernel, grid, static_cast<unsigned>(threads), true, stream, p),
        c.name.c_str());
}

const char* commit = "unknown";

struct Case {
  const char* name;
  int hidden, padded, top_k;
};

template <int kTopK>
void run(const Case& c, bool cold, int num_tokens) {
  const size_t slots = static_cast<size_t>(num_tokens) * c.top_k;
  const size_t bytes = num_tokens * size_t{2} * c.hidden * (c.top_k + 2) + slots * 8;
  const shape_sweep::Run run{"finalize", c.name, cold,  num_tokens, c.hidden,
                             c.top_k,    bytes,  bytes, 200};
  const size_t copies = run.copies();
  size_t pool_rows = 1;
  while (pool_rows < copies * slots) pool_rows *= 2;  // stream_row wants a power of two

  const size_t out_count = copies * num_tokens * c.hidden;
  shape_sweep::Buffers buffers;
  const Bf16* pool = buffers.filled(pool_rows * c.padded, 1);
  const Bf16* shared = buffers.filled(out_count, 7);
  auto* out = buffers.allocate<Bf16>(out_count);
  const shape_sweep::Routing routing = shape_sweep::random_routing(buffers, copies * slots);
  std::vector<moe::FinalizeParams> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    const size_t token = i * num_tokens;
    moe::FinalizeParams& p = calls[i];
    p.out = out + token * c.hidden;
    p.gemm2_out = pool;
    p.row_of = routing.row_of + i * slots;
    p.weights = routing.weights + i * slots;
    p.shared = shared + token * c.hidden;
    p.out_stride = p.shared_stride = c.hidden;
    p.gemm2_stride = c.padded;
    p.num_tokens = num_tokens;
    p.num_rows = static_cast<int64_t>(pool_rows);
    p.hidden_dim = c.hidden;
    p.top_k = c.top_k;
    p.routed_factor = 1.0f;
  }
  const size_t compared = std::min<size_t>(out_count * 2, 1 << 20);
  const shape_sweep::Output written{reinterpret_cast<uint8_t*>(out), out_count * 2,
                                    out_count * 2 - compared, compared};
  shape_sweep::time_in_turn(run, candidates<kTopK>(), calls, written, launch, "", commit);
}

template <int kTopK>
void sweep(const Case& c) {
  for (int tokens : {1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256}) run<kTopK>(c, false, tokens);
  for (int tokens : {1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192}) run<kTopK>(c, true, tokens);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) commit = argv[1];
  std::printf("[");
  sweep<8>({"deepseek-v3", 7168, 7168, 8});
  run<8>({"deepseek-v3", 7168, 7168, 8}, true, 16384);
  sweep<8>({"glm-4.5", 5120, 5120, 8});
  sweep<8>({"qwen3-235b", 4096, 4096, 8});
  sweep<8>({"qwen3-30b", 2048, 2048, 8});
  sweep<10>({"qwen3-next", 2048, 2048, 10});
  sweep<4>({"gpt-oss-120b", 2880, 3072, 4});
  sweep<6>({"deepseek-v2", 5120, 5120, 6});
  sweep<1>({"llama4", 5120, 5120, 1});
  sweep<16>({"kimi-k3", 3584, 3584, 16});
  std::printf("\n]\n");
  return 0;
}
