// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// finalize_norm_shapes/sweep.cu: times the finalize-norm kernels in launch shapes of one's choice,
// for tuning csrc/moe/finalize_norm.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I include -o sweep
//       benchmarks/finalize_norm_shapes/sweep.cu && ./sweep COMMIT > norm_shapes.json
//
// bfloat16 rows, float32 weights, PDL; how they are timed, ../shape_sweep.cuh says. Every shape
// must give the first one's bits.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "../shape_sweep.cuh"
#include "sgl_moe_jit/moe/finalize_norm_wide.cuh"

namespace {

using namespace sgl_moe_jit;  // NOLINT: a program of its own
using moe::SidesAt;
using shape_sweep::Bf16;
using shape_sweep::check;

struct Candidate {
  std::string name;
  void (*kernel)(moe::FinalizeNormParams);
  int vec, pieces, max_threads, blocks;
  bool wide;
  bool same_bits = true;
};

template <int kTopK, bool kFp8, int kBytes, int kPieces, int kThreads, int kMinBlocks,
          SidesAt kSidesAt>
Candidate shape(int blocks) {
  constexpr int kVec = kBytes / 2;
  using Cluster =
      moe::NormShape<kVec, kPieces, kThreads, kMinBlocks, kTopK, kSidesAt, moe::ClusterExchange>;
  using Alone =
      moe::NormShape<kVec, kPieces, kThreads, kMinBlocks, kTopK, kSidesAt, moe::BlockExchange>;
  const char* const sides[] = {"sides first", "with rows", "weight last"};
  std::string name = std::to_string(kBytes) + " bytes, " + std::to_string(kPieces) + " pieces, " +
                     std::to_string(kThreads) + " threads, " + std::to_string(kMinBlocks) +
                     " blocks, ";
  if (blocks > 1) name += "cluster of " + std::to_string(blocks) + ", ";
  name += sides[static_cast<int>(kSidesAt)];
  const auto kernel = blocks > 1 ? moe::finalize_norm_kernel<Bf16, float, kTopK, kFp8, Cluster>
                                 : moe::finalize_norm_kernel<Bf16, float, kTopK, kFp8, Alone>;
  return {name, kernel, kVec, kPieces, kThreads, blocks, false};
}

template <int kTopK, bool kFp8>
std::vector<Candidate> candidates() {
  using Wide = moe::NormShape<8, 1, 256, 2, kTopK, SidesAt::kWithRows, moe::BlockExchange>;
  constexpr SidesAt kFirst = SidesAt::kFirst, kWith = SidesAt::kWithRows,
                    kLast = SidesAt::kWeightLast;
  return {
      shape<kTopK, kFp8, 16, 2, 448, 2, kLast>(1),   // Block
      shape<kTopK, kFp8, 8, 1, 256, 3, kWith>(8),    // Tiny
      shape<kTopK, kFp8, 16, 1, 256, 2, kWith>(4),   // Few
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(7),  // Small
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(4),
      shape<kTopK, kFp8, 16, 1, 448, 2, kFirst>(2),  // Pair
      shape<kTopK, kFp8, 16, 1, 128, 6, kLast>(7),   // Many
      shape<kTopK, kFp8, 16, 1, 512, 2, kLast>(1),   // Narrow
      shape<kTopK, kFp8, 16, 2, 256, 4, kLast>(2),   // Spread
      shape<kTopK, kFp8, 16, 2, 448, 2, kFirst>(1),
      shape<kTopK, kFp8, 16, 2, 448, 2, kWith>(1),
      shape<kTopK, kFp8, 16, 2, 448, 2, kWith>(2),
      shape<kTopK, kFp8, 8, 1, 256, 3, kFirst>(8),
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(5),
      shape<kTopK, kFp8, 16, 1, 448, 2, kFirst>(3),
      shape<kTopK, kFp8, 16, 1, 128, 6, kFirst>(7),
      shape<kTopK, kFp8, 16, 1, 128, 6, kWith>(7),
      shape<kTopK, kFp8, 16, 1, 128, 7, kLast>(7),
      shape<kTopK, kFp8, 16, 1, 128, 8, kLast>(7),
      shape<kTopK, kFp8, 16, 4, 224, 4, kLast>(1),
      shape<kTopK, kFp8, 8, 1, 256, 3, kWith>(4),   // Tiny, Few and Small where a row is
      shape<kTopK, kFp8, 16, 1, 256, 2, kWith>(2),  // worth no more blocks
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(2),
      {"16 bytes, 256 threads, 2 blocks, in shared memory",
       moe::finalize_norm_wide_kernel<Bf16, float, kTopK, kFp8, Wide>, 8, 1, 256, 1, true},
  };
}

// Threads that take equal parts of a row; 0: it does not fit, or would leave blocks nearly empty.
int threads_for(const Candidate& c, int hidden) {
  if (c.wide) return c.max_threads;
  const int parts = c.blocks * c.pieces, vectors = hidden / c.vec;
  const int threads = ((vectors + parts - 1) / parts + 31) / 32 * 32;
  return threads <= c.max_threads && threads >= 64 ? threads : 0;
}

void launch(const Candidate& c, const moe::FinalizeNormParams& p, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(c.blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(c.blocks, static_cast<unsigned>(p.sum.num_tokens));
  config.blockDim = dim3(threads_for(c, p.sum.hidden_dim));
  if (c.wide) config.dynamicSmemBytes = moe::wide_bytes(p.sum.hidden_dim, c.vec, c.max_threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = c.blocks > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, c.kernel, p), c.name.c_str());
}

const char* commit = "unknown";

struct Case {
  const char* name;
  int hidden, top_k;
};

template <int kTopK, bool kFp8>
void run(const Case& c, bool cold, int num_tokens) {
  const size_t slots = static_cast<size_t>(num_tokens) * c.top_k;
  const size_t bytes = num_tokens * size_t(c.hidden) * (2 * (c.top_k + 3) + (kFp8 ? 1 : 2));
  const shape_sweep::Run run{
      "norm", c.name, cold, num_tokens, c.hidden, c.top_k, bytes, bytes + slots * 8, 120};
  const size_t copies = run.copies();
  const size_t count = copies * num_tokens * c.hidden, item = kFp8 ? 1 : 2;
  shape_sweep::Buffers buffers;
  const Bf16* pool = buffers.filled(count * c.top_k, 1);
  const Bf16* shared = buffers.filled(count, 7);
  const Bf16* residual = buffers.filled(count, 11);
  const Bf16* norm_weight = buffers.filled(c.hidden, 13);
  auto* out = buffers.allocate<uint8_t>(count * 2);
  auto* residual_out = buffers.allocate<Bf16>(count);
  auto* scale = buffers.allocate<float>(copies * num_tokens);
  const shape_sweep::Routing routing = shape_sweep::random_routing(buffers, copies * slots);
  std::vector<moe::FinalizeNormParams> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    const size_t token = i * num_tokens, first = token * c.hidden;
    moe::FinalizeNormParams& p = calls[i];
    p.sum.out = out + first * item;
    p.sum.gemm2_out = pool;
    p.sum.row_of = routing.row_of + i * slots;
    p.sum.weights = routing.weights + i * slots;
    p.sum.shared = shared + first;
    p.sum.out_stride = p.sum.gemm2_stride = p.sum.shared_stride = c.hidden;
    p.sum.num_tokens = num_tokens;
    p.sum.num_rows = static_cast<int64_t>(copies * slots);
    p.sum.hidden_dim = c.hidden;
    p.sum.top_k = c.top_k;
    p.sum.routed_factor = 1.0f;
    p.residual_out = residual_out + first;
    p.scale = kFp8 ? scale + token : nullptr;
    p.residual = residual + first;
    p.norm_weight = norm_weight;
    p.residual_out_stride = p.residual_stride = c.hidden;
    p.eps = 1e-6f;
  }
  std::vector<Candidate> fitting;
  for (const Candidate& x : candidates<kTopK, kFp8>()) {
    if (threads_for(x, c.hidden) > 0) fitting.push_back(x);
  }
  const shape_sweep::Output written{out, count * 2, 0, std::min<size_t>(count * item, 1 << 20)};
  shape_sweep::time_in_turn(run, fitting, calls, written, launch, kFp8 ? ", FP8 out" : "", commit);
}

template <int kTopK, bool kFp8>
void sweep(const Case& c) {
  for (int tokens :
       {1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256, 264}) {
    run<kTopK, kFp8>(c, false, tokens);
  }
  for (int tokens : {1, 16, 64, 128, 144, 160, 176, 192, 208, 224, 240, 256, 264, 512, 4096})
    run<kTopK, kFp8>(c, true, tokens);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) commit = argv[1];
  std::printf("[");
  sweep<8, false>({"deepseek-v3", 7168, 8});
  sweep<8, true>({"deepseek-v3", 7168, 8});
  sweep<8, false>({"qwen3-235b", 4096, 8});
  sweep<8, false>({"qwen3-30b", 2048, 8});
  std::printf("\n]\n");
  return 0;
}
