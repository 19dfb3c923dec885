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
// once.
template <typename Weight, int kRows>
struct RouteChunk {
  int32_t row[kRows];
  float weight[kRows];

  // wide: both pointers are multiples of four items, so that four slots move in one access.
  __device__ __forceinline__ RouteChunk(const int32_t* row_of, const Weight* weights, bool wide) {
    if (kRows % 4 == 0 && wide) {
#pragma unroll
      for (int k = 0; k < kRows; k += 4) {
        const auto four = device::load<int32_t, 4>(row_of + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) row[k + i] = four.values[i];
      }
#pragma unroll
      for (int k = 0; k < kRows; k += 4) {
        const auto four = device::load<Weight, 4>(weights + k);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[k + i] = device::to_float(four.values[i]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kRows; ++k) row[k] = row_of[k];
#pragma unroll
      for (int k = 0; k < kRows; ++k) weight[k] = device::to_float(weights[k]);
    }
  }

  __device__ __forceinline__ bool any() const {
    bool found = false;
#pragma unroll
    for (int k = 0; k < kRows; ++k) found |= row[k] >= 0;
    return found;
  }
};

template <bool kStreaming, typename T, int kSize>
__device__ __forceinline__ device::Vector<T, kSize> load_row(const T* p) {
  if constexpr (kStreaming) {
    return device::load_once<T, kSize>(p);
  } else {
    return device::load<T, kSize>(p);
  }
}

// Adds kRows slots to acc in ascending order. An absent row is neither loaded nor multiplied by
// zero.
template <bool kStreaming, typename Act, typename Weight, int kRows, int kVec>
__device__ __forceinline__ void add_rows(const RouteChunk<Weight, kRows>& route, const Act* column,
                                         int64_t stride, float (&acc)[kVec]) {
  device::Vector<Act, kVec> loaded[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (route.row[k] >= 0) {
      loaded[k] = load_row<kStreaming, Act, kVec>(column + route.row[k] * stride);
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (route.row[k] >= 0) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        acc[i] = __fmaf_rn(route.weight[k], device::to_float(loaded[k].values[i]), acc[i]);
      }
    }
  }
}

// One block takes one token (blockIdx.x) and blockDim.x * kVecsPerThread vectors of its columns
// (blockIdx.y). kTopK is the number of slots, known at compile time so that all of a token's rows
// are in flight together; 0 means p.top_k, in steps of four. kVec values move in one access; kVec =
// 1 has no alignment demands. kStreaming marks rows as read once.
template <typename Act, typename Weight, int kTopK, int kVec, int kMaxThreads, int kVecsPerThread,
          bool kStreaming>
__global__ void __launch_bounds__(kMaxThreads) finalize_kernel(const FinalizeParams p) {
  constexpr int kChunk = kTopK > 0 ? kTopK : 4;
  constexpr int kHead = kTopK > 0 ? kTopK : 1;
  static_assert(kTopK >= 0 && kTopK <= 16, "more rows in flight than registers can hold");

  const int64_t token = blockIdx.x;
  const int top_k = kTopK > 0 ? kTopK : p.top_k;
  const int32_t* row_of = p.row_of + token * top_k;
  const Weight* weights = static_cast<const Weight*>(p.weights) + token * top_k;
  const Act* gemm2_out = static_cast<const Act*>(p.gemm2_out);
  const Act* shared = static_cast<const Act*>(p.shared);
  Act* out = static_cast<Act*>(p.out) + token * p.out_stride;
  if (shared != nullptr) shared += token * p.shared_stride;
  const int first = (blockIdx.y * blockDim.x * kVecsPerThread + threadIdx.x) * kVec;

  // Indices, weights, rows and shared all come from kernels ahead of us: read nothing before this.
  // And the next kernel may start only now, when no predecessor still needs the multiprocessors it
  // would take.
  device::pdl_wait();
  device::pdl_launch_dependents();

  const RouteChunk<Weight, kHead> head(row_of, weights, p.wide_routes);
  bool present = head.any();
  if (kTopK == 0) {
    for (int k = 1; k < top_k && !present; ++k) present = row_of[k] >= 0;
  }
#pragma unroll
  for (int v = 0; v < kVecsPerThread; ++v) {
    const int column = first + v * blockDim.x * kVec;
    if (column >= p.hidden_dim) return;
    device::Vector<Act, kVec> result;
    if (shared != nullptr) result = load_row<kStreaming, Act, kVec>(shared + column);
    float acc[kVec] = {};
    if constexpr (kTopK > 0) {
      add_rows<kStreaming>(head, gemm2_out + column, p.gemm2_stride, acc);
    } else {
      int k = 0;
      for (; k + kChunk <= top_k; k += kChunk) {
        const RouteChunk<Weight, kChunk> route(row_of + k, weights + k, p.wide_routes);
        add_rows<kStreaming>(route, gemm2_out + column, p.gemm2_stride, acc);
      }
      for (; k < top_k; ++k) {
        const RouteChunk<Weight, 1> route(row_of + k, weights + k, false);
        add_rows<kStreaming>(route, gemm2_out + column, p.gemm2_stride, acc);
      }
    }
    if (present) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        float sum = acc[i];
        // The two intrinsics keep the compiler from fusing the product with the sum.
        if (p.routed_factor != 1.0f) sum = __fmul_rn(sum, p.routed_factor);
        if (shared != nullptr) sum = __fadd_rn(sum, device::to_float(result.values[i]));
        result.values[i] = device::from_float<Act>(sum);
      }
    } else if (shared == nullptr) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) result.values[i] = device::from_float<Act>(0.0f);
    }
    device::store<Act, kVec>(out + column, result);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
