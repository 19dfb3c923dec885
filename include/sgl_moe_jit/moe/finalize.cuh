// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cuh: weighted un-permute and shared-expert add in one pass. Device code only.
//
//   out[t, h] = shared[t, h] + factor * sum_k weights[t, k] * gemm2_out[row_of[t, k], h]
//
// Cost per token, H hidden, K = top_k, K' <= K rows present, A bytes an activation, W bytes a
// weight:
//   bytes = A * H * (K' + has_shared + 1) + K * (4 + W)        flops = H * (2 K' + has_shared)
// H = 7168, K' = 8, bf16: 143 KB and 0.85 flop a byte, so memory bandwidth is the only wall that
// matters; at one token it is two dependent trips to L2 (indices, then rows).
//
// Arithmetic, the same on every path and on the CPU, so that a row alone equals the row in a batch:
//   acc = +0; for k ascending, present rows only: acc = fma(w, g, acc); acc *= factor unless it is
//   1; acc += shared; out = round_to_nearest_even(acc). A token without rows copies shared, or
//   writes +0.
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/moe/finalize_params.h"

namespace sgl_moe_jit {
namespace moe {

// Routing of kRows neighbouring slots: rows (negative = absent) and weights, all loads in flight at
// once. kWide: both pointers are multiples of four items, and four slots move in one access.
template <typename Weight, int kRows, bool kWide>
struct RouteChunk {
  static constexpr int kStep = kWide ? 4 : 1;
  int32_t row[kRows];
  float weight[kRows];
  uint32_t present =
      0;  // bit k: row[k] is there. One register where kRows comparisons would need as many.

  __device__ __forceinline__ RouteChunk(const int32_t* row_of, const Weight* weights) {
    static_assert(kRows % kStep == 0, "a wide access would reach into the next token");
#pragma unroll
    for (int k = 0; k < kRows; k += kStep) {
      const auto loaded = device::load<int32_t, kStep>(row_of + k);
#pragma unroll
      for (int i = 0; i < kStep; ++i) row[k + i] = loaded.get(i);
    }
#pragma unroll
    for (int k = 0; k < kRows; k += kStep) {
      const auto loaded = device::load<Weight, kStep>(weights + k);
#pragma unroll
      for (int i = 0; i < kStep; ++i) weight[k + i] = device::to_float(loaded.get(i));
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) present |= static_cast<uint32_t>(row[k] >= 0) << k;
  }

  __device__ __forceinline__ bool has(int k) const { return (present >> k) & 1u; }
};

// Adds a chunk's slots to acc, in ascending order; all their loads are in flight together. An
// absent row is neither loaded nor multiplied by zero.
template <typename Act, typename Weight, int kRows, bool kWide, int kVec>
__device__ __forceinline__ void add_rows(const RouteChunk<Weight, kRows, kWide>& route,
                                         const Act* column, int64_t stride, float (&acc)[kVec]) {
  device::Vector<Act, kVec> loaded[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (route.has(k)) {
      loaded[k] = device::load<Act, kVec>(column + route.row[k] * stride);
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (route.has(k)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        acc[i] = __fmaf_rn(route.weight[k], device::to_float(loaded[k].get(i)), acc[i]);
      }
    }
  }
}

// How a kernel covers its work; chosen by the launcher.
//   vec            values moved in one access; 1 makes no alignment demands
//   max_threads    threads a block at most
//   min_blocks     blocks a multiprocessor must hold: caps the registers
//   vecs_per_thread
//   rows_in_flight rows a thread loads before it adds them
template <int vec, int max_threads, int min_blocks, int vecs_per_thread, int rows_in_flight>
struct FinalizeShape {
  static constexpr int kVec = vec;
  static constexpr int kMaxThreads = max_threads;
  static constexpr int kMinBlocks = min_blocks;
  static constexpr int kVecsPerThread = vecs_per_thread;
  static constexpr int kRowsInFlight = rows_in_flight;
};

// Whether a kernel reads routing four slots at a time, and so needs it aligned.
template <int kTopK, int kVec>
constexpr bool kWideRoutes = kVec > 1 && kTopK > 0 && kTopK % 4 == 0;

// One block takes one token (blockIdx.x) and blockDim.x * kVecsPerThread vectors of its columns
// (blockIdx.y). kTopK is the number of slots, known at compile time; 0 means p.top_k, in steps of
// four.
template <typename Act, typename Weight, int kTopK, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads, Shape::kMinBlocks)
    finalize_kernel(const FinalizeParams p) {
  constexpr int kVec = Shape::kVec;
  constexpr int kRows = Shape::kRowsInFlight;
  constexpr bool kWide = kWideRoutes<kTopK, kVec> && kRows % 4 == 0;
  constexpr bool kOneChunk = kTopK == kRows;
  static_assert(kTopK == 0 || kTopK % kRows == 0, "slots would be left over");

  const int64_t token = blockIdx.x;
  const int top_k = kTopK > 0 ? kTopK : p.top_k;
  const int32_t* row_of = p.row_of + token * top_k;
  const Weight* weights = static_cast<const Weight*>(p.weights) + token * top_k;
  const Act* gemm2_out = static_cast<const Act*>(p.gemm2_out);
  const Act* shared = static_cast<const Act*>(p.shared);
  Act* out = static_cast<Act*>(p.out) + token * p.out_stride;
  if (shared != nullptr) shared += token * p.shared_stride;
  const int first = (blockIdx.y * blockDim.x * Shape::kVecsPerThread + threadIdx.x) * kVec;

  // Indices, weights, rows and shared all come from kernels ahead of us: read nothing before this.
  // And the next kernel may start only now, when no predecessor still needs the multiprocessors it
  // would take.
  device::pdl_wait();
  device::pdl_launch_dependents();

#pragma unroll 1
  for (int v = 0; v < Shape::kVecsPerThread; ++v) {
    const int column = first + v * blockDim.x * kVec;
    if (column >= p.hidden_dim) return;
    device::Vector<Act, kVec> result;
    if (shared != nullptr) result = device::load<Act, kVec>(shared + column);
    float acc[kVec] = {};
    const Act* rows = gemm2_out + column;
    uint32_t present = 0;
    if constexpr (kOneChunk) {
      const RouteChunk<Weight, kRows, kWide> route(row_of, weights);
      add_rows(route, rows, p.gemm2_stride, acc);
      present = route.present;
    } else {
      int k = 0;
#pragma unroll 1
      for (; k + kRows <= top_k; k += kRows) {
        const RouteChunk<Weight, kRows, kWide> route(row_of + k, weights + k);
        add_rows(route, rows, p.gemm2_stride, acc);
        present |= route.present;
      }
#pragma unroll 1
      for (; kTopK == 0 && k < top_k; ++k) {
        const RouteChunk<Weight, 1, false> route(row_of + k, weights + k);
        add_rows(route, rows, p.gemm2_stride, acc);
        present |= route.present;
      }
    }
    if (present != 0) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        float sum = acc[i];
        // The two intrinsics keep the compiler from fusing the product with the sum.
        if (p.routed_factor != 1.0f) sum = __fmul_rn(sum, p.routed_factor);
        if (shared != nullptr) sum = __fadd_rn(sum, device::to_float(result.get(i)));
        result.set(i, device::from_float<Act>(sum));
      }
    } else if (shared == nullptr) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) result.set(i, device::from_float<Act>(0.0f));
    }
    device::store<Act, kVec>(out + column, result);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
