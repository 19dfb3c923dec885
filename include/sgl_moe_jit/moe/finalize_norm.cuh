// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm.cuh: finalize, residual add and RMSNorm in one pass. Device code only;
// finalize_norm_params.h has the formula and the order of operations.
//
// Cost per token, H hidden, K = top_k, K' <= K rows present, A bytes an activation, W bytes a
// weight, O bytes an output:
//   bytes = A * H * (K' + has_shared + 2) + O * H + K * (4 + W)     (norm_weight stays in cache)
//   flops = H * (2 K' + has_shared + 5)
// The finalized row, which two kernels would write and read again, and which would be rounded in
// between, stays on chip: 2 * A * H bytes less. With few tokens the wall is latency (indices, rows,
// one exchange between blocks), with many memory bandwidth.
#pragma once

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/finalize_norm_reduce.cuh"
#include "sgl_moe_jit/moe/finalize_norm_row.cuh"

namespace sgl_moe_jit {
namespace moe {

// A grid's second dimension ends here; more tokens go on in the third.
constexpr int64_t kNormTokensInY = 65535;

// When a thread loads what stands beside the rows, that is shared, residual and norm_weight: those
// of its first piece before the routing is there; all with the rows; or norm_weight after the sum.
enum class SidesAt { kFirst, kWithRows, kWeightLast };

// How a kernel covers its work; chosen by the launcher.
//   vec             values moved in one access; 1 makes no alignment demands
//   pieces          of a row in a thread's registers
//   threads         a block at most; a multiple of 32
//   min_blocks      blocks a multiprocessor must hold: caps the registers
//   rows_in_flight  rows a thread loads before it adds them
//   sides_at        when it loads what stands beside the rows
template <int vec, int pieces, int threads, int min_blocks, int rows_in_flight, SidesAt sides_at,
          typename Between>
struct NormShape {
  static constexpr int kVec = vec;
  static constexpr int kPieces = pieces;
  static constexpr int kMaxThreads = threads;
  static constexpr int kMinBlocks = min_blocks;
  static constexpr int kRowsInFlight = rows_in_flight;
  static constexpr SidesAt kSidesAt = sides_at;
  using Exchange = Between;
};

// The blocks of a shape that a multiprocessor must hold. For sm_100 the compiler would spill four
// bytes in one kernel of float32 with FP8 output.
template <typename Act, bool kQuantised>
constexpr int blocks_held(int min_blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
  if (sizeof(Act) == 4 && kQuantised && min_blocks > 3) return 3;
#endif
  return min_blocks;
}

// A row in the registers of one block, or of a cluster of blocks: rank r has the r-th equal part of
// the columns, thread t of it every blockDim.x-th piece from the t-th on.
template <typename Act, typename Weight, int kTopK, bool kQuantised, typename Shape>
__global__ void __launch_bounds__(Shape::kMaxThreads,
                                  blocks_held<Act, kQuantised>(Shape::kMinBlocks))
    finalize_norm_kernel(const FinalizeNormParams p) {
  constexpr int kPieces = Shape::kPieces;
  using Row = NormRow<Act, Weight, kTopK, kQuantised, Shape::kVec, Shape::kRowsInFlight>;
  constexpr int kColumns = Row::kColumns;
  const int64_t token = blockIdx.y + blockIdx.z * kNormTokensInY;
  if (token >= p.sum.num_tokens) return;
  __shared__ SlotMemory memory;
  typename Shape::Exchange exchange(memory);
  const int num_warps = blockDim.x / 32;
  const int num_slots = exchange.size() * kPieces * num_warps;
  const int first_slot = exchange.rank() * kPieces * num_warps + threadIdx.x / 32;
  const int first = (exchange.rank() * kPieces * blockDim.x + threadIdx.x) * kColumns;
  const int step = blockDim.x * kColumns;
  exchange.begin(num_slots, kQuantised ? 2 : 1);
  const FinalizeParams routed = without_shared(p.sum);
  Row row(p, routed, token, first);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) row.prefetch(j * step);
  // Everything comes from kernels ahead of us, norm_weight too if it was just loaded: read nothing
  // before this. And the next kernel may start only now, when no predecessor still needs the
  // multiprocessors it would take.
  device::pdl_wait();
  device::pdl_launch_dependents();
  row.load_routing();
  typename Row::Sides sides[kPieces];
  typename Row::Piece norm_weight[kPieces];
  if constexpr (Shape::kSidesAt == SidesAt::kFirst) {
    sides[0] = row.sides(0);
    norm_weight[0] = row.norm_weight(0);
    // Once more, for nothing but this: the compiler moves no load across it. It would move these
    // behind the arrival of the routing, or even of rows.
    device::pdl_launch_dependents();
  }
  float s[kPieces][kColumns];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (j > 0 || Shape::kSidesAt != SidesAt::kFirst) {
      sides[j] = row.sides(j * step);
      if (Shape::kSidesAt != SidesAt::kWeightLast) norm_weight[j] = row.norm_weight(j * step);
    }
    row.add(j * step, sides[j], s[j]);
    exchange.put(0, first_slot + j * num_warps, warp_sum(sum_of_squares(s[j])));
    row.store_sum(j * step, s[j]);
  }
  const float total = total_of<kColumns>(exchange.wait(0), num_slots);
  if constexpr (Shape::kSidesAt == SidesAt::kWeightLast) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) norm_weight[j] = row.norm_weight(j * step);
  }
  const float inv = math::inverse_rms(total, p.sum.hidden_dim, p.eps);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    row.normalise(s[j], inv, norm_weight[j]);
    if constexpr (kQuantised) exchange.put(1, first_slot + j * num_warps, warp_max(largest(s[j])));
  }
  float inverse_scale = 1.0f;
  if constexpr (kQuantised) {
    const float scale = math::fp8_scale(largest_of(exchange.wait(1), num_slots));
    inverse_scale = math::fp8_inverse_scale(scale);
    if (first == 0) p.scale[token] = scale;
  }
#pragma unroll
  for (int j = 0; j < kPieces; ++j) row.store(j * step, s[j], inverse_scale);
}

}  // namespace moe
}  // namespace sgl_moe_jit
