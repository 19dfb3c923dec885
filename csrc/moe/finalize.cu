// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cu: which shape of the finalize kernel serves a call.
//
// The build passes SMJ_ACTIVATION (__nv_bfloat16, __half or float), SMJ_WEIGHT (one of these or
// UnitWeight), SMJ_TOP_K (0: any) and SMJ_GATE (0 or 1).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = SMJ_WEIGHT;
constexpr int kTopK = SMJ_TOP_K;

// Values in an access of so many bytes.
template <int kBytes>
constexpr int kValues = kBytes / static_cast<int>(sizeof(Act));

// Rows a thread has in flight: all of them where they are few or their vectors short. Sixteen of 16
// bytes take 90 registers and lose.
constexpr int kRowsWide = kTopK == 0 ? 8 : kTopK > 10 ? kTopK / 2 : kTopK;
constexpr int kRowsNarrow = kTopK == 0 ? 8 : kTopK;

// The fewer tokens, the narrower the vectors: more threads share the work of a token.
using Scalar = FinalizeShape<1, 256, 4, kRowsNarrow>;
using Tiny = FinalizeShape<kValues<4>, 128, 8, kRowsNarrow>;
using Small = FinalizeShape<kValues<8>, 256, 4, kRowsNarrow>;
using Middle = FinalizeShape<kValues<16>, 448, 2, kRowsWide>;
using Large = FinalizeShape<kValues<16>, 128, kTopK == 0 ? 6 : kTopK == 10 ? 7 : 8, kRowsWide>;

// Crossovers in 16-byte vectors of output that a multiprocessor has to make, so that other widths
// and chips scale. H200 (132 multiprocessors), 2026-11-29, benchmarks/results/finalize_shapes.json.
// Of hidden 7168 and top 8: Tiny to 8 tokens, Small to 35, Middle to 162 where it suits (see
// below): 67 to 95 and from 133 on go to Large, 96 to 110 to Small. With few rows a block is over
// sooner and starting blocks weighs more, so the narrow shapes end earlier.
constexpr int64_t kSlots = kTopK == 0 ? 8 : kTopK;
constexpr int64_t kTinyLimit = kSlots < 4 ? 10 * kSlots : 60;
constexpr int64_t kSmallLimit = kSlots < 4 ? 40 + 60 * kSlots : 240;
constexpr int64_t kMiddleLimit = 1100;

struct Grid {
  int threads, blocks;  // of a token
};

// The fewest equal blocks, in whole warps, that cover a token's vectors.
template <typename Shape>
Grid even_grid(const FinalizeParams& p) {
  const int vectors = (p.hidden_dim + Shape::kVec - 1) / Shape::kVec;
  const int blocks = (vectors + Shape::kMaxThreads - 1) / Shape::kMaxThreads;
  return {((vectors + blocks - 1) / blocks + 31) / 32 * 32, blocks};
}

template <typename Shape>
Grid full_grid(const FinalizeParams& p) {
  constexpr int kColumns = Shape::kVec * Shape::kMaxThreads;
  return {Shape::kMaxThreads, (p.hidden_dim + kColumns - 1) / kColumns};
}

template <typename Shape>
constexpr auto kKernel = finalize_kernel<Act, Weight, kTopK, SMJ_GATE != 0, Shape>;

// With PDL the next kernel's blocks take the places this one leaves free. If these hold a part of
// them, and only a part, the rest comes late and to a few multiprocessors: 96 tokens of 7168 took
// 3.5 us in Large and 2.7 in Small (H200, 2026-11-29). So a shape suits when the blocks of two
// kernels fit side by side, or those of one nearly fill the chip.
template <typename Shape>
bool suits(const FinalizeParams& p, const Grid& grid, int64_t num_sms) {
  static std::atomic<int> registers{0};
  const int known = host::registers_of(reinterpret_cast<const void*>(kKernel<Shape>), registers);
  const int64_t places = num_sms * host::blocks_a_sm(known, grid.threads);
  const int64_t blocks = p.num_tokens * grid.blocks;
  return 2 * blocks <= places || (blocks <= places && 100 * blocks >= 84 * places);
}

template <typename Shape>
cudaError_t launch(const FinalizeParams& p, const Grid& grid, bool enable_pdl,
                   cudaStream_t stream) {
  const int64_t in_y = p.num_tokens < kTokensInY ? p.num_tokens : kTokensInY;
  const dim3 blocks(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(in_y),
                    static_cast<unsigned>((p.num_tokens + in_y - 1) / in_y));
  return host::launch_kernel(kKernel<Shape>, blocks, static_cast<unsigned>(grid.threads),
                             enable_pdl, stream, p);
}

template <typename Shape>
cudaError_t launch_even(const FinalizeParams& p, bool enable_pdl, cudaStream_t stream) {
  return launch<Shape>(p, even_grid<Shape>(p), enable_pdl, stream);
}

// Whether every access of bytes that the kernel would make is aligned and inside its row.
bool fits_vector(const FinalizeParams& p, uint64_t bytes) {
  const uint64_t size = sizeof(Act);
  uint64_t together = static_cast<uint64_t>(p.hidden_dim) * size;
  const auto add = [&](const void* base, int64_t stride) {
    together |= reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(stride) * size;
  };
  add(p.out, p.out_stride);
  add(p.gemm2_out, p.gemm2_stride);
  if (p.shared != nullptr) add(p.shared, p.shared_stride);
  return together % bytes == 0;
}

}  // namespace

cudaError_t launch_finalize(const FinalizeParams& p, int device, bool enable_pdl, bool allow_vector,
                            cudaStream_t stream) {
  const bool fits4 = allow_vector && fits_vector(p, 4);
  if (!fits4) return launch<Scalar>(p, full_grid<Scalar>(p), enable_pdl, stream);
  if (!fits_vector(p, 8)) return launch<Tiny>(p, full_grid<Tiny>(p), enable_pdl, stream);
  if (!fits_vector(p, 16)) return launch_even<Small>(p, enable_pdl, stream);
  const int64_t num_sms = std::max(1, host::sm_count(device));
  const int64_t vectors_a_sm = p.num_tokens * (p.hidden_dim / kValues<16>) / num_sms;
  if (vectors_a_sm <= kTinyLimit) {
    return launch<Tiny>(p, full_grid<Tiny>(p), enable_pdl, stream);
  }
  if (vectors_a_sm <= kSmallLimit) return launch_even<Small>(p, enable_pdl, stream);
  if (vectors_a_sm <= kMiddleLimit) {
    if (suits<Middle>(p, even_grid<Middle>(p), num_sms)) {
      return launch_even<Middle>(p, enable_pdl, stream);
    }
    if (suits<Small>(p, even_grid<Small>(p), num_sms)) {
      return launch_even<Small>(p, enable_pdl, stream);
    }
  }
  return launch<Large>(p, full_grid<Large>(p), enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
