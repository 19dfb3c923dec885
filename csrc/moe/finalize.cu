// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cu: which shape of the finalize kernel serves a call.
//
// The build passes SMJ_ACTIVATION and SMJ_WEIGHT (__nv_bfloat16 or float) and SMJ_TOP_K (0: any).
#include <algorithm>
#include <type_traits>

#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = SMJ_WEIGHT;
constexpr int kTopK = SMJ_TOP_K;

constexpr int kHalf = 8 / sizeof(Act), kFull = 16 / sizeof(Act);
// Rows a thread has in flight. More than eight of 16 bytes take registers from other threads.
constexpr int kRows = kTopK == 0 ? 4 : kTopK > 8 ? kTopK / 2 : kTopK;
// Blocks a multiprocessor must hold, which caps a thread's registers (64 or 80; 72 in Large)
// without a spill. When the compiler took 128, half of the threads found no place, and 16384 tokens
// of 7168 took 635 us instead of 543.
constexpr int kBlocks = kTopK == 0 || kTopK > 8 ? 6 : 8;
using Scalar = FinalizeShape<1, 256, 1, 1, kRows>;
using Half = FinalizeShape<kHalf, 128, kBlocks, 1, kRows>;
using Base = FinalizeShape<kFull, 128, kBlocks, 1, kRows>;
using Large = std::conditional_t<(kTopK > 8), FinalizeShape<kFull, 128, kBlocks, 1, kRows>,
                                 FinalizeShape<kFull, 448, 2, 2, kRows>>;

// 16-byte vectors of output a multiprocessor has to make, from where on Large wins if its blocks
// are nearly full (hidden 7168, not 5120: fewer threads would find a place). Between 1024 and 2048
// tokens of hidden 7168, top 8, on an H200 (132 SMs), 2026-11-29; see docs/kernel_notes.md.
constexpr int64_t kLargeLimit = 10240;
constexpr int kLargeMinThreads = 416;

template <typename Shape>
cudaError_t launch(const FinalizeParams& p, int threads, bool enable_pdl, cudaStream_t stream) {
  const int columns = Shape::kVec * threads * Shape::kVecsPerThread;
  const dim3 grid(static_cast<unsigned>(p.num_tokens), (p.hidden_dim + columns - 1) / columns);
  return host::launch_kernel(finalize_kernel<Act, Weight, kTopK, Shape>, grid, threads, enable_pdl,
                             stream, p);
}

bool is_multiple(const void* base, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(base) % bytes == 0;
}

// Whether every access of bytes that the kernel would make is aligned and inside its row.
bool fits_vector(const FinalizeParams& p, int bytes) {
  const auto aligned = [bytes](const void* base, int64_t stride) {
    return is_multiple(base, bytes) && stride * static_cast<int64_t>(sizeof(Act)) % bytes == 0;
  };
  return static_cast<int64_t>(p.hidden_dim) * static_cast<int64_t>(sizeof(Act)) % bytes == 0 &&
         aligned(p.out, p.out_stride) && aligned(p.gemm2_out, p.gemm2_stride) &&
         (p.shared == nullptr || aligned(p.shared, p.shared_stride)) &&
         (!kWideRoutes<kTopK, 2> ||
          (is_multiple(p.row_of, 16) && is_multiple(p.weights, 4 * sizeof(Weight))));
}

// Threads of the fewest equal blocks, in whole warps, that cover a token's vectors.
template <typename Shape>
int even_threads(int vectors) {
  constexpr int kMax = Shape::kVecsPerThread * Shape::kMaxThreads;
  const int blocks = (vectors + kMax - 1) / kMax;
  const int share = Shape::kVecsPerThread * blocks;
  return ((vectors + share - 1) / share + 31) / 32 * 32;
}

}  // namespace

cudaError_t launch_finalize(const FinalizeParams& p, bool enable_pdl, bool allow_vector,
                            cudaStream_t stream) {
  if (!allow_vector || !fits_vector(p, 8)) {
    return launch<Scalar>(p, Scalar::kMaxThreads, enable_pdl, stream);
  }
  if (!fits_vector(p, 16)) return launch<Half>(p, Half::kMaxThreads, enable_pdl, stream);
  const int vectors = p.hidden_dim / kFull;
  const int64_t vectors_per_sm = p.num_tokens * vectors / std::max(1, host::sm_count());
  const int threads = even_threads<Large>(vectors);
  if (vectors_per_sm >= kLargeLimit && threads >= kLargeMinThreads) {
    return launch<Large>(p, threads, enable_pdl, stream);
  }
  return launch<Base>(p, Base::kMaxThreads, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
