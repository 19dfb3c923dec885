// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// finalize_shapes/sweep.cu: times the finalize kernel in launch shapes of one's choice, for tuning
// csrc/moe/finalize.cu.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I include -o sweep \
//       benchmarks/finalize_shapes/sweep.cu && ./sweep COMMIT > shapes.json
//
// bfloat16 rows, float32 weights. Each shape's calls are captured in one graph with PDL; graphs
// take turns in a rotating order, each replayed once untimed before a sample. Cold: the calls'
// buffers exceed three times the L2 cache. Every shape must give the first one's bits. `stream`
// reads the same rows in the same order without indices and weights, `stream in a row` neighbouring
// ones: what memory alone allows.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"

namespace {

using namespace sgl_moe_jit;  // NOLINT: a program of its own
using Bf16 = __nv_bfloat16;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

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
  int hidden, padded, top_k;
};

template <int kTopK>
void run(const Case& c, bool cold, int num_tokens) {
  const size_t row_count = static_cast<size_t>(num_tokens) * c.top_k;
  const size_t bytes = num_tokens * size_t{2} * c.hidden * (c.top_k + 2) + row_count * 8;
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  const size_t copies = cold ? std::max<size_t>(4, 3 * size_t(device.l2CacheSize) / bytes + 1) : 1;
  const int repeats = num_tokens <= 256 ? std::max<int>(1, static_cast<int>(200 / copies)) : 1;
  size_t pool_rows = 1;
  while (pool_rows < copies * row_count) pool_rows *= 2;  // stream_row wants a power of two

  const size_t out_count = copies * num_tokens * c.hidden;
  auto* pool = allocate<Bf16>(pool_rows * c.padded);
  auto* shared = allocate<Bf16>(out_count);
  auto* out = allocate<Bf16>(out_count);
  auto* row_of = allocate<int32_t>(copies * row_count);
  auto* weights = allocate<float>(copies * row_count);
  fill<<<1024, 256>>>(pool, pool_rows * c.padded, 1);
  fill<<<1024, 256>>>(shared, out_count, 7);
  std::mt19937 random(5);
  std::vector<int32_t> rows(copies * row_count);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<float> factors(rows.size());
  for (float& x : factors) x = static_cast<float>(random() & 0xffff) / 65536.0f;
  check(cudaMemcpy(row_of, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(weights, factors.data(), rows.size() * 4, cudaMemcpyHostToDevice), "copy");
  std::vector<moe::FinalizeParams> calls(copies);
  for (size_t i = 0; i < copies; ++i) {
    const size_t token = i * num_tokens;
    calls[i] = {out + token * c.hidden,
                pool,
                row_of + i * row_count,
                weights + i * row_count,
                shared + token * c.hidden,
                nullptr,
                c.hidden,
                c.padded,
                c.hidden,
                num_tokens,
                static_cast<int64_t>(pool_rows),
                c.hidden,
                c.top_k,
                1.0f,
                false};
  }

  const std::vector<Candidate> all = candidates<kTopK>();
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::vector<cudaGraphExec_t> graphs(all.size());
  std::vector<uint16_t> want, got(std::min<size_t>(out_count, 1 << 19));
  for (size_t i = 0; i < all.size(); ++i) {
    check(cudaMemset(out, 0xff, out_count * 2), "memset");
    for (const auto& p : calls) launch(all[i], p, stream);
    check(cudaStreamSynchronize(stream), all[i].name.c_str());
    check(cudaMemcpy(got.data(), out + (out_count - got.size()), got.size() * 2,
                     cudaMemcpyDeviceToHost),
          "copy");
    if (i == 0) want = got;
    if (all[i].same_bits && got != want) {
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
        "%s\n{\"subject\": \"finalize\", \"case\": \"%s\", \"mode\": \"%s\", \"num_tokens\": %d, "
        "\"hidden_dim\": %d, \"top_k\": %d, \"weight_dtype\": \"float32\", \"provider\": \"%s\", "
        "\"median_us\": %.3f, \"p20_us\": %.3f, \"p80_us\": %.3f, \"samples\": %d, "
        "\"bytes\": %zu, \"device\": \"%s\", \"versions\": {\"cuda\": \"%d.%d\"}, "
        "\"commit\": \"%s\", \"command\": \"sweep COMMIT > FILE\"}",
        is_first ? "" : ",", c.name, cold ? "cold" : "hot", num_tokens, c.hidden, c.top_k,
        all[i].name.c_str(), samples[i][kRounds / 2], samples[i][kRounds / 5],
        samples[i][kRounds * 4 / 5], kRounds, bytes, device.name, CUDART_VERSION / 1000,
        CUDART_VERSION % 1000 / 10, commit);
    is_first = false;
    check(cudaGraphExecDestroy(graphs[i]), "graph");
  }
  check(cudaStreamDestroy(stream), "stream");
  for (void* p : {static_cast<void*>(pool), static_cast<void*>(shared), static_cast<void*>(out),
                  static_cast<void*>(row_of), static_cast<void*>(weights)}) {
    check(cudaFree(p), "cudaFree");
  }
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
