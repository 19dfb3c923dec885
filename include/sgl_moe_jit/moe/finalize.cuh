// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cuh: weighted un-permute and shared-expert add in one pass. Device code only.
//
//   out[t, h] = gate[t] * shared[t, h] + factor * sum_k weights[t, k] * gemm2_out[row_of[t, k], h]
//
// Cost per token, H hidden, K = top_k, K' <= K rows present, A bytes an activation, W bytes a
// weight:
//   bytes = A * H * (K' + has_shared + 1) + K * (4 + W)        flops = H * (2 K' + has_shared)
// H = 7168, K' = 8, bf16: 143 KB and 0.85 flop a byte, so memory bandwidth is the only wall that
// matters; at one token it is two dependent trips to L2 (indices, then rows).
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/moe/finalize_sum.cuh"

namespace sgl_moe_jit {
namespace moe {

// How a kernel covers its work; chosen by the launcher.
//   vec             values moved in one access; 1 makes no alignment demands
//   threads         a block at most; a multiple of 32
//   min_blocks      blocks a multiprocessor must hold: caps the registers
//   rows_in_flight  rows a thread loads before it adds them
template <int vec, int threads, int min_blocks, int rows_in_flight>
struct FinalizeShape {
  static constexpr int kVec = vec;
  static constexpr int kMaxThreads = threads;
  static constexpr int kMinBlocks = min_blocks;
  static constexpr int kRowsInFlight = rows_in_flight;
};

// A grid's second dimension ends here; more tokens go on in the third.
constexpr int64_t kTokensInY = 65535;

// One block takes one token (blockIdx.y, z) and blockDim.x vectors of its columns (blockIdx.x:
// neighbours in a row run side by side). kTopK is the number of slots, known at compile time; 0
// means p.top_k. kGate: the shared row has a gate.
template <typename Act, typename Weight, int kTopK, bool kGate, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads, Shape::kMinBlocks)
    finalize_kernel(const FinalizeParams p) {
  constexpr int kVec = Shape::kVec;
  const int64_t token = blockIdx.y + blockIdx.z * kTokensInY;
  if (token >= p.num_tokens) return;
  // Lanes beyond the row stay for the shuffles, read its first columns and write nothing.
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kVec;
  const bool inside = column < p.hidden_dim;
  TokenSum<Act, Weight, kTopK, kGate, kVec, Shape::kRowsInFlight> sum(p, token,
                                                                      inside ? column : 0);
  Act* out = static_cast<Act*>(p.out) + (token * p.out_stride + column);

  sum.prefetch();
  // Indices, weights, rows, gate and shared all come from kernels ahead of us: read nothing before
  // this. And the next kernel may start only now, when no predecessor still needs the
  // multiprocessors it would take.
  device::pdl_wait();
  device::pdl_launch_dependents();

  sum.load_routing();
  const auto result = sum.finished();
  if (inside) device::store<Act, kVec>(out, result);
}

}  // namespace moe
}  // namespace sgl_moe_jit
