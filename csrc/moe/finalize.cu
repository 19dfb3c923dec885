// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cu: which shape of the finalize kernel serves a call.
//
// The build passes SMJ_ACTIVATION and SMJ_WEIGHT (__nv_bfloat16 or float) and SMJ_TOP_K (0: any).
#include <algorithm>

#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = SMJ_WEIGHT;
constexpr int kTopK = SMJ_TOP_K;

// 16-byte vectors of output a multiprocessor has to make. Up to kSmall, 8-byte accesses win by
// making twice the blocks; from kLarge on, a block a token with two vectors a thread, rows kept in
// L2 as they come. Crossovers measured on an H200 (132 SMs) at hidden 7168, top 8, between 32 and
// 64 and between 1024 and 2048 tokens, 2026-11-29, see docs/kernel_notes.md.
constexpr int64_t kSmall = 256;
constexpr int64_t kLarge = 10240;
// 448: one block makes hidden 7168 with no idle thread. More than eight rows in flight spill
// registers unless a thread makes one vector and the block is smaller.
constexpr int kLargeMaxThreads = kTopK > 8 ? 256 : 448;
constexpr int kLargeVecs = kTopK > 8 ? 1 : 2;

template <int kVec, int kMaxThreads, int kVecsPerThread, bool kStreaming>
cudaError_t launch(const FinalizeParams& p, int threads, bool enable_pdl, cudaStream_t stream) {
  const int columns = kVec * threads * kVecsPerThread;
  const dim3 grid(static_cast<unsigned>(p.num_tokens), (p.hidden_dim + columns - 1) / columns);
  return host::launch_kernel(
      finalize_kernel<Act, Weight, kTopK, kVec, kMaxThreads, kVecsPerThread, kStreaming>, grid,
      threads, enable_pdl, stream, p);
}

bool is_multiple(const void* base, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(base) % bytes == 0;
}

// Whether every access of kBytes that the kernel would make is aligned and inside its row.
bool fits_vector(const FinalizeParams& p, int bytes) {
  const auto aligned = [bytes](const void* base, int64_t stride) {
    return is_multiple(base, bytes) && stride * static_cast<int64_t>(sizeof(Act)) % bytes == 0;
  };
  return static_cast<int64_t>(p.hidden_dim) * static_cast<int64_t>(sizeof(Act)) % bytes == 0 &&
         aligned(p.out, p.out_stride) && aligned(p.gemm2_out, p.gemm2_stride) &&
         (p.shared == nullptr || aligned(p.shared, p.shared_stride));
}

// Threads of the fewest equal blocks, in whole warps, that give each thread kLargeVecs of a token.
int large_threads(int vectors) {
  const int blocks =
      (vectors + kLargeVecs * kLargeMaxThreads - 1) / (kLargeVecs * kLargeMaxThreads);
  const int threads = (vectors + kLargeVecs * blocks - 1) / (kLargeVecs * blocks);
  return (threads + 31) / 32 * 32;
}

}  // namespace

cudaError_t launch_finalize(const FinalizeParams& params, bool enable_pdl, bool allow_vector,
                            cudaStream_t stream) {
  constexpr int kHalf = 8 / sizeof(Act), kFull = 16 / sizeof(Act);
  FinalizeParams p = params;
  p.wide_routes =
      p.top_k % 4 == 0 && is_multiple(p.row_of, 16) && is_multiple(p.weights, 4 * sizeof(Weight));
  if (!allow_vector || !fits_vector(p, 8)) {
    return launch<1, 256, 1, true>(p, 256, enable_pdl, stream);
  }
  const int vectors = p.hidden_dim / kFull;
  const int64_t vectors_per_sm = p.num_tokens * vectors / std::max(1, host::sm_count());
  if (vectors_per_sm <= kSmall || !fits_vector(p, 16)) {
    return launch<kHalf, 128, 1, true>(p, 128, enable_pdl, stream);
  }
  if (vectors_per_sm < kLarge) return launch<kFull, 128, 1, true>(p, 128, enable_pdl, stream);
  return launch<kFull, kLargeMaxThreads, kLargeVecs, false>(p, large_threads(vectors), enable_pdl,
                                                            stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
