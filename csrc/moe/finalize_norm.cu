// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm.cu: which shape of the finalize-norm kernels serves a call.
//
// The build passes SMJ_ACTIVATION (__nv_bfloat16, __half or float), SMJ_WEIGHT (one of these or
// UnitWeight), SMJ_TOP_K (0: any), SMJ_FP8 (0 or 1) and SMJ_CLUSTERS (0 or 1: the target has them).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize_norm.cuh"
#include "sgl_moe_jit/moe/finalize_norm_launch.h"
#include "sgl_moe_jit/moe/finalize_norm_wide.cuh"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = SMJ_WEIGHT;
constexpr int kTopK = SMJ_TOP_K;
constexpr bool kFp8 = SMJ_FP8 != 0;

// Columns of a 16-byte access.
constexpr int kBroad = 16 / static_cast<int>(sizeof(Act));

// Rows a thread has in flight.
constexpr int kRows = kTopK == 0 ? 8 : kTopK > 10 ? kTopK / 2 : kTopK;

using Tiny = NormShape<kNormLeaf, 1, 256, 3, kTopK == 0 ? 8 : kTopK, false, ClusterExchange>;
using Small = NormShape<kBroad, 1, 256, 2, kRows, true, ClusterExchange>;
using Pair = NormShape<kBroad, 1, 448, 2, kRows, true, ClusterExchange>;
using Spread = NormShape<kBroad, 2, 448, 2, kRows, true, ClusterExchange>;
using Block = NormShape<kBroad, 2, 448, 2, kRows, true, BlockExchange>;
using Lone = NormShape<kBroad, 1, 896, 1, kRows, true, BlockExchange>;

// For what the others cannot do.
using Wide = NormShape<kBroad, 1, 256, 2, kRows, false, BlockExchange>;
using Odd = NormShape<kNormLeaf, 1, 256, 2, kRows, false, BlockExchange>;
using Scalar = NormShape<1, 1, 256, 2, kRows, false, BlockExchange>;

cudaError_t launch(void (*kernel)(FinalizeNormParams), const FinalizeNormParams& p, int blocks,
                   int threads, int64_t shared_bytes, bool enable_pdl, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (enable_pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  }
  const int64_t tokens = p.sum.num_tokens;
  const int64_t in_y = tokens < kNormTokensInY ? tokens : kNormTokensInY;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(in_y),
                        static_cast<unsigned>((tokens + in_y - 1) / in_y));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Equal parts, in whole warps, of a row for a cluster of blocks (one: no cluster).
template <typename Shape>
cudaError_t launch_shape(const FinalizeNormParams& p, int blocks, bool enable_pdl,
                         cudaStream_t stream) {
  const int pieces = (p.sum.hidden_dim + Shape::kVec - 1) / Shape::kVec;
  const int parts = blocks * Shape::kPieces;
  const int threads = ((pieces + parts - 1) / parts + 31) / 32 * 32;
  return launch(finalize_norm_kernel<Act, Weight, kTopK, kFp8, Shape>, p, blocks, threads, 0,
                enable_pdl, stream);
}

template <typename Shape>
cudaError_t launch_wide(const FinalizeNormParams& p, bool enable_pdl, cudaStream_t stream) {
  const auto kernel = finalize_norm_wide_kernel<Act, Weight, kTopK, kFp8, Shape>;
  const int columns = Shape::kVec == 1 ? kNormLeaf : Shape::kVec;
  const int64_t bytes = wide_bytes(p.sum.hidden_dim, columns, Shape::kMaxThreads);
  constexpr int64_t kWithoutAsking = 46 * 1024;  // of 48 KB a kernel may have, less its own
  if (bytes > kWithoutAsking) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) return status;
  }
  return launch(kernel, p, 1, Shape::kMaxThreads, bytes, enable_pdl, stream);
}

// Whether every row of every tensor starts on a multiple of so many columns.
bool fits_columns(const FinalizeNormParams& p, int columns) {
  const uint64_t bytes = sizeof(Act) * columns;
  uint64_t together = static_cast<uint64_t>(p.sum.hidden_dim) * sizeof(Act);
  const auto add = [&](const void* base, int64_t stride) {
    together |= reinterpret_cast<uintptr_t>(base) | static_cast<uint64_t>(stride) * sizeof(Act);
  };
  add(p.sum.gemm2_out, p.sum.gemm2_stride);
  if (p.sum.shared != nullptr) add(p.sum.shared, p.sum.shared_stride);
  add(p.residual, p.residual_stride);
  add(p.residual_out, p.residual_out_stride);
  add(p.norm_weight, 0);
  if (!kFp8) add(p.sum.out, p.sum.out_stride);
  const uint64_t out =
      reinterpret_cast<uintptr_t>(p.sum.out) | static_cast<uint64_t>(p.sum.out_stride);
  return together % bytes == 0 && (!kFp8 || out % columns == 0);
}

// The cluster that a row takes at least.
template <typename Shape>
int fewest_blocks(const FinalizeNormParams& p) {
  const int held = Shape::kPieces * Shape::kVec * Shape::kMaxThreads;
  return (p.sum.hidden_dim + held - 1) / held;
}

constexpr int kMaxBlocks = 8;  // of a cluster on any GPU that has them

// Blocks for a token so that each has some work.
template <typename Shape>
int blocks_for(const FinalizeNormParams& p, int wanted) {
  const int warps = (p.sum.hidden_dim + 32 * Shape::kVec - 1) / (32 * Shape::kVec);
  return std::max(fewest_blocks<Shape>(p), std::min(wanted, (warps + 3) / 4));
}

cudaError_t launch_clusters(const FinalizeNormParams& p, bool enable_pdl, cudaStream_t stream) {
  const int64_t num_sms = host::sm_count() > 0 ? host::sm_count() : 1;
  const int64_t tokens = p.sum.num_tokens;
  const auto fits = [&](auto shape) { return fewest_blocks<decltype(shape)>(p) <= kMaxBlocks; };
  if (fits(Tiny{}) && 12 * tokens <= num_sms) {
    return launch_shape<Tiny>(p, blocks_for<Tiny>(p, 8), enable_pdl, stream);
  }
  if (fits(Small{}) && 2 * tokens <= num_sms) {
    const int wanted = 10 * tokens <= 3 * num_sms ? 7 : 4;
    return launch_shape<Small>(p, blocks_for<Small>(p, wanted), enable_pdl, stream);
  }
  if (fits(Pair{}) &&
      (8 * tokens <= 5 * num_sms || (2 * tokens > 3 * num_sms && tokens <= 2 * num_sms))) {
    return launch_shape<Pair>(p, blocks_for<Pair>(p, 2), enable_pdl, stream);
  }
  if (fewest_blocks<Block>(p) == 1) return launch_shape<Block>(p, 1, enable_pdl, stream);
  if (fits(Spread{})) {
    return launch_shape<Spread>(p, fewest_blocks<Spread>(p), enable_pdl, stream);
  }
  return launch_wide<Wide>(p, enable_pdl, stream);
}

}  // namespace

cudaError_t launch_finalize_norm(const FinalizeNormParams& p, bool enable_pdl, bool allow_vector,
                                 cudaStream_t stream) {
  if (!allow_vector || !fits_columns(p, kNormLeaf)) {
    return launch_wide<Scalar>(p, enable_pdl, stream);
  }
  if (!fits_columns(p, kBroad)) return launch_wide<Odd>(p, enable_pdl, stream);
#if SMJ_CLUSTERS
  return launch_clusters(p, enable_pdl, stream);
#else
  if (fewest_blocks<Block>(p) == 1) return launch_shape<Block>(p, 1, enable_pdl, stream);
  return launch_wide<Wide>(p, enable_pdl, stream);
#endif
}

}  // namespace moe
}  // namespace sgl_moe_jit
