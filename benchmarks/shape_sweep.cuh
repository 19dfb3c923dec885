// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// shape_sweep.cuh: what the sweeps of launch shapes share: buffers, graphs in turn, one JSON list.
//
// Each shape's calls are captured in one graph; graphs take turns in a rotating order, each
// replayed once untimed before a sample. Cold: the calls' buffers exceed three times the L2 cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace shape_sweep {

using Bf16 = __nv_bfloat16;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// Numbers in [-1, 1) that depend on place and seed alone.
static __global__ void fill(Bf16* x, size_t count, uint32_t seed) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += step) {
    uint32_t h = static_cast<uint32_t>(i * 2654435761u) ^ seed;
    h ^= h >> 15;
    h *= 2246822519u;
    x[i] = __float2bfloat16_rn(static_cast<float>((h >> 13) & 0xffff) / 32768.0f - 1.0f);
  }
}

// Device memory of one run, given back at its end.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (void* p : all_) check(cudaFree(p), "cudaFree");
  }

  template <typename T>
  T* allocate(size_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, count * sizeof(T)), "cudaMalloc");
    all_.push_back(p);
    return static_cast<T*>(p);
  }

  Bf16* filled(size_t count, uint32_t seed) {
    auto* x = allocate<Bf16>(count);
    fill<<<1024, 256>>>(x, count, seed);
    return x;
  }

 private:
  std::vector<void*> all_;
};

// Each slot's row, all rows in random order, and its weight in [0, 1).
struct Routing {
  const int32_t* row_of;
  const float* weights;
};

inline Routing random_routing(Buffers& buffers, size_t slots) {
  auto* row_of = buffers.allocate<int32_t>(slots);
  auto* weights = buffers.allocate<float>(slots);
  std::mt19937 random(5);
  std::vector<int32_t> rows(slots);
  std::iota(rows.begin(), rows.end(), 0);
  std::shuffle(rows.begin(), rows.end(), random);
  std::vector<float> factors(slots);
  for (float& x : factors) x = static_cast<float>(random() & 0xffff) / 65536.0f;
  check(cudaMemcpy(row_of, rows.data(), slots * 4, cudaMemcpyHostToDevice), "copy");
  check(cudaMemcpy(weights, factors.data(), slots * 4, cudaMemcpyHostToDevice), "copy");
  return {row_of, weights};
}

// What one run is called in the results, and how often its calls are made.
struct Run {
  const char* subject;
  const char* case_name;
  bool cold;
  int num_tokens, hidden_dim, top_k;
  size_t bytes;           // of one call, for the choice of copies
  size_t reported_bytes;  // in the results
  int calls_in_graph;     // at least, for few tokens

  size_t copies() const {
    if (!cold) return 1;
    cudaDeviceProp device{};
    check(cudaGetDeviceProperties(&device, 0), "device");
    return std::max<size_t>(4, 3 * static_cast<size_t>(device.l2CacheSize) / bytes + 1);
  }
  int repeats() const {
    if (num_tokens > 256) return 1;
    return std::max<int>(1, static_cast<int>(calls_in_graph / copies()));
  }
};

inline void print_result(const Run& run, const std::string& provider, const std::vector<float>& us,
                         const char* commit) {
  static bool is_first = true;
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::printf(
      "%s\n{\"subject\": \"%s\", \"case\": \"%s\", \"mode\": \"%s\", \"num_tokens\": %d, "
      "\"hidden_dim\": %d, \"top_k\": %d, \"weight_dtype\": \"float32\", \"provider\": \"%s\", "
      "\"median_us\": %.3f, \"p20_us\": %.3f, \"p80_us\": %.3f, \"samples\": %zu, "
      "\"bytes\": %zu, \"device\": \"%s\", \"versions\": {\"cuda\": \"%d.%d\"}, "
      "\"commit\": \"%s\", \"command\": \"sweep COMMIT > FILE\"}",
      is_first ? "" : ",", run.subject, run.case_name, run.cold ? "cold" : "hot", run.num_tokens,
      run.hidden_dim, run.top_k, provider.c_str(), us[us.size() / 2], us[us.size() / 5],
      us[us.size() * 4 / 5], us.size(), run.reported_bytes, device.name, CUDART_VERSION / 1000,
      CUDART_VERSION % 1000 / 10, commit);
  is_first = false;
}

// What the shapes write, of which the last bytes are compared.
struct Output {
  uint8_t* data;
  size_t allocated, compared_from, compared;
};

// Runs all shapes once and compares, captures, times and prints them. Shape: name, same_bits.
// launch(shape, call, stream) makes one call.
template <typename Shape, typename Call, typename Launch>
void time_in_turn(const Run& run, const std::vector<Shape>& shapes, const std::vector<Call>& calls,
                  const Output& out, Launch launch, const std::string& suffix, const char* commit) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  std::vector<cudaGraphExec_t> graphs(shapes.size());
  std::vector<uint8_t> want, got(out.compared);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Shape& shape = shapes[i];
    check(cudaMemset(out.data, 0xff, out.allocated), "memset");
    for (const Call& call : calls) launch(shape, call, stream);
    check(cudaStreamSynchronize(stream), shape.name.c_str());
    check(
        cudaMemcpy(got.data(), out.data + out.compared_from, out.compared, cudaMemcpyDeviceToHost),
        "copy");
    if (i == 0) want = got;
    if (shape.same_bits && got != want) {
      std::fprintf(stderr, "%s: other bits than %s\n", shape.name.c_str(), shapes[0].name.c_str());
      std::exit(1);
    }
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int r = 0; r < run.repeats(); ++r) {
      for (const Call& call : calls) launch(shape, call, stream);
    }
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&graphs[i], graph, 0), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }

  constexpr size_t kRounds = 11, kWarmup = 2;
  const auto calls_made = static_cast<float>(calls.size() * static_cast<size_t>(run.repeats()));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<std::vector<float>> samples(shapes.size());
  for (size_t round = 0; round < kWarmup + kRounds; ++round) {
    for (size_t j = 0; j < shapes.size(); ++j) {
      const size_t i = (j + round) % shapes.size();
      check(cudaGraphLaunch(graphs[i], stream), "replay");
      check(cudaEventRecord(begin, stream), "event");
      check(cudaGraphLaunch(graphs[i], stream), "replay");
      check(cudaEventRecord(end, stream), "event");
      check(cudaEventSynchronize(end), "event");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (round >= kWarmup) samples[i].push_back(ms * 1e3f / calls_made);
    }
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    std::sort(samples[i].begin(), samples[i].end());
    print_result(run, shapes[i].name + suffix, samples[i], commit);
    check(cudaGraphExecDestroy(graphs[i]), "graph");
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  check(cudaStreamDestroy(stream), "stream");
}

}  // namespace shape_sweep
