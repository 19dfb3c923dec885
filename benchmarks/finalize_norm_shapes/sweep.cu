// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// finalize_norm_shapes/sweep.cu: times the finalize-norm kernels in launch shapes of one's choice,
// for tuning csrc/moe/finalize_norm.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I include -o sweep
//       benchmarks/finalize_norm_shapes/sweep.cu && ./sweep COMMIT > norm_shapes.json
//
// bfloat16 rows, float32 weights. Each shape's calls are captured in one graph with PDL; graphs
// take turns in a rotating order, each replayed once untimed before a sample. Cold: the calls'
// buffers exceed three times the L2 cache. Every shape must give the first one's bits.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "sgl_moe_jit/moe/finalize_norm_wide.cuh"

namespace {

using namespace sgl_moe_jit;  // NOLINT: a program of its own
using Bf16 = __nv_bfloat16;
using moe::SidesAt;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

struct Candidate {
  std::string name;
  void (*kernel)(moe::FinalizeNormParams);
  int vec, pieces, max_threads, blocks;
  bool wide;
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
      shape<kTopK, kFp8, 16, 2, 448, 2, kFirst>(1),  // Block
      shape<kTopK, kFp8, 8, 1, 256, 3, kWith>(8),    // Tiny
      shape<kTopK, kFp8, 16, 1, 256, 2, kWith>(4),   // Few
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(7),  // Small
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(4),
      shape<kTopK, kFp8, 16, 1, 448, 2, kFirst>(2),  // Pair
      shape<kTopK, kFp8, 16, 1, 512, 2, kLast>(1),   // Narrow
      shape<kTopK, kFp8, 16, 2, 448, 2, kLast>(1),   // Large
      shape<kTopK, kFp8, 16, 2, 448, 2, kWith>(2),   // Spread
      shape<kTopK, kFp8, 8, 1, 256, 3, kFirst>(8),
      shape<kTopK, kFp8, 16, 1, 256, 2, kFirst>(5),
      shape<kTopK, kFp8, 16, 1, 448, 2, kFirst>(3),
      shape<kTopK, kFp8, 16, 4, 224, 4, kLast>(1),
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

__global__ void fill(Bf16* x, size_t count, uint32_t seed) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    uint32_t h = static_cast<uint32_t>(i * 2654435761u) ^ seed;
    h ^= h >> 15;
    h *= 2246822519u;
    x[i] = __float2bfloat16_rn(static_cast<float>((h >> 13) & 0xffff) / 32768.0f - 1.0f);
  }
}

template <typename T>
T* allocate(size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(p);
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
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  const size_t copies = cold ? std::max<size_t>(4, 3 * size_t(device.l2CacheSize) / bytes + 1) : 1;
  const int repeats = num_tokens <= 256 ? std::max<int>(1, static_cast<int>(120 / copies)) : 1;

  const size_t count = copies * num_tokens * c.hidden;
  auto* pool = allocate<Bf16>(count * c.top_k);
  auto* shared = allocate<Bf16>(count);
  auto* residual = allocate<Bf16>(count);
  auto* norm_weight = allocate<Bf16>(c.hidden);
  auto* out = allocate<uint8_t>(count * 2);
  auto* residual_out = allocate<Bf16>(count);
  auto* scale = allocate<float>(copies * num_tokens);
  auto* row_of = allocate<int32_t>(copies * slots);
  auto* weights = allocate<float>(copies * slots);
  fill<<<1024, 256>>>(pool, count * c.top_k, 1);
  fill<<<1024, 256>>>(shared, count, 7);
  fill<<<1024, 256>>>(residual, count, 11);
  fill<<<64, 256>>>(norm_weight, c.hidden, 13);
  std::mt19937 random(5);
  std::vector<int32_t> rows(copies * slots);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<float> factors(rows.size());
  for (float& x : factors) x = static_cast<float>(random() & 0xffff) / 65536.0f;
  check(cudaMemcpy(row_of, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(weights, factors.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
  std::vector<moe::FinalizeNormParams> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    const size_t token = i * num_tokens, first = token * c.hidden;
    moe::FinalizeNormParams& p = calls[i];
    p.sum.out = out + first * (kFp8 ? 1 : 2);
    p.sum.gemm2_out = pool;
    p.sum.row_of = row_of + i * slots;
    p.sum.weights = weights + i * slots;
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

  std::vector<Candidate> all;
  for (const Candidate& x : candidates<kTopK, kFp8>()) {
    if (threads_for(x, c.hidden) > 0) all.push_back(x);
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::vector<cudaGraphExec_t> graphs(all.size());
  const size_t compared = std::min<size_t>(count * (kFp8 ? 1 : 2), 1 << 20);
  std::vector<uint8_t> want, got(compared);
  for (size_t i = 0; i < all.size(); ++i) {
    check(cudaMemset(out, 0xff, count * 2), "memset");
    for (const auto& p : calls) launch(all[i], p, stream);
    check(cudaStreamSynchronize(stream), all[i].name.c_str());
    check(cudaMemcpy(got.data(), out, compared, cudaMemcpyDeviceToHost), "copy");
    if (i == 0) want = got;
    if (got != want) {
      std::fprintf(stderr, "%s: other bits than %s\n", all[i].name.c_str(), all[0].name.c_str());
      std::exit(1);
    }
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int r = 0; r < repeats; ++r) {
      for (const auto& p : calls) launch(all[i], p, stream);
    }
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&graphs[i], graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }

  constexpr int kRounds = 11, kWarmup = 2;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<std::vector<float>> samples(all.size());
  for (size_t round = 0; round < kWarmup + kRounds; ++round) {
    for (size_t j = 0; j < all.size(); ++j) {
      const size_t i = (j + round) % all.size();
      check(cudaGraphLaunch(graphs[i], stream), "replay");
      check(cudaEventRecord(begin, stream), "event");
      check(cudaGraphLaunch(graphs[i], stream), "replay");
      check(cudaEventRecord(end, stream), "event");
      check(cudaEventSynchronize(end), "event");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (round >= kWarmup) samples[i].push_back(ms * 1e3f / static_cast<float>(copies * repeats));
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    std::sort(samples[i].begin(), samples[i].end());
    static bool is_first = true;
    std::printf(
        "%s\n{\"subject\": \"norm\", \"case\": \"%s\", \"mode\": \"%s\", \"num_tokens\": %d, "
        "\"hidden_dim\": %d, \"top_k\": %d, \"weight_dtype\": \"float32\", \"provider\": \"%s%s\", "
        "\"median_us\": %.3f, \"p20_us\": %.3f, \"p80_us\": %.3f, \"samples\": %d, "
        "\"bytes\": %zu, \"device\": \"%s\", \"versions\": {\"cuda\": \"%d.%d\"}, "
        "\"commit\": \"%s\", \"command\": \"sweep COMMIT > FILE\"}",
        is_first ? "" : ",", c.name, cold ? "cold" : "hot", num_tokens, c.hidden, c.top_k,
        all[i].name.c_str(), kFp8 ? ", FP8 out" : "", samples[i][kRounds / 2],
        samples[i][kRounds / 5], samples[i][kRounds * 4 / 5], kRounds, bytes + slots * 8,
        device.name, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, commit);
    is_first = false;
    check(cudaGraphExecDestroy(graphs[i]), "graph");
  }
  check(cudaStreamDestroy(stream), "stream");
  for (void* p : std::initializer_list<void*>{pool, shared, residual, norm_weight, out,
                                              residual_out, scale, row_of, weights}) {
    check(cudaFree(p), "cudaFree");
  }
}

template <int kTopK, bool kFp8>
void sweep(const Case& c) {
  for (int tokens : {1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256}) {
    run<kTopK, kFp8>(c, false, tokens);
  }
  for (int tokens : {1, 16, 64, 128, 256, 512, 4096}) run<kTopK, kFp8>(c, true, tokens);
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
