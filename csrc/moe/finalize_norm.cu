// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm.cu: which shape of the finalize-norm kernels serves a call.
//
// The build passes SMJ_ACTIVATION (__nv_bfloat16, __half or float), SMJ_TOP_K (0: any), SMJ_FP8 (0
// or 1) and SMJ_CLUSTERS (0 or 1: the target has them).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize_norm.cuh"
#include "sgl_moe_jit/moe/finalize_norm_launch.h"
#include "sgl_moe_jit/moe/finalize_norm_wide.cuh"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = AnyWeight;  // else four times as many modules of nine kernels each
constexpr int kTopK = SMJ_TOP_K;
constexpr bool kFp8 = SMJ_FP8 != 0;

// Columns of a 16-byte access.
constexpr int kBroad = 16 / static_cast<int>(sizeof(Act));

// Rows a thread has in flight: sixteen vectors of 16 bytes would take too many registers.
constexpr int kRowsNarrow = kTopK == 0 ? 8 : kTopK;
constexpr int kRows = kTopK == 0 ? 8 : kTopK > 10 ? kTopK / 2 : kTopK;

template <int threads, int min_blocks, SidesAt sides_at>
using OnePiece = NormShape<kBroad, 1, threads, min_blocks, kRows, sides_at, ClusterExchange>;
template <int vec, int pieces, int threads, SidesAt sides_at>
using OneBlock = NormShape<vec, pieces, threads, 2, kRows, sides_at, BlockExchange>;

// A cluster of blocks shares a token where there are few; the fewer, the narrower its vectors.
using Tiny = NormShape<kNormLeaf, 1, 256, 3, kRowsNarrow, SidesAt::kWithRows, ClusterExchange>;
using Few = OnePiece<256, 2, SidesAt::kWithRows>;
using Small = OnePiece<256, 2, SidesAt::kFirst>;
using Pair = OnePiece<448, 2, SidesAt::kFirst>;
using Many = OnePiece<128, 6, SidesAt::kWeightLast>;
// Also what the registers of one block do not hold.
using Spread = NormShape<kBroad, 2, 256, 4, kRows, SidesAt::kWeightLast, ClusterExchange>;
// One block a token.
using Narrow = OneBlock<kBroad, 1, 512, SidesAt::kWeightLast>;
// Float32 has no registers left for the weight beside eight rows.
using Block = OneBlock<kBroad, 2, 448, sizeof(Act) == 4 ? SidesAt::kFirst : SidesAt::kWeightLast>;
// In shared memory: what has other alignments, and wide rows where there are no clusters.
using Wide = OneBlock<kBroad, 1, 256, SidesAt::kWithRows>;
using Odd = OneBlock<kNormLeaf, 1, 256, SidesAt::kWithRows>;
using Scalar = OneBlock<1, 1, 256, SidesAt::kWithRows>;

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

// Equal parts, in whole warps, of a row for so many blocks. One block is launched without a
// cluster, in which sending a message is an illegal instruction: not for shapes with a
// ClusterExchange.
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
  constexpr int kColumns = Shape::kVec == 1 ? kNormLeaf : Shape::kVec;
  const int64_t bytes = wide_bytes(p.sum.hidden_dim, kColumns, Shape::kMaxThreads);
  constexpr int64_t kWithoutAsking = 46 * 1024;  // of 48 KB a kernel may have, less its own
  if (bytes > kWithoutAsking) {
    // The same for every width: another thread may ask between this and our launch.
    constexpr int64_t kMost = wide_bytes(kMaxNormHidden, kColumns, Shape::kMaxThreads);
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMost));
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

// Blocks whose registers hold a row.
template <typename Shape>
int fewest_blocks(const FinalizeNormParams& p) {
  const int held = Shape::kPieces * Shape::kVec * Shape::kMaxThreads;
  return (p.sum.hidden_dim + held - 1) / held;
}

cudaError_t launch_alone(const FinalizeNormParams& p, bool enable_pdl, cudaStream_t stream) {
  if (fewest_blocks<Narrow>(p) == 1) return launch_shape<Narrow>(p, 1, enable_pdl, stream);
  if (fewest_blocks<Block>(p) == 1) return launch_shape<Block>(p, 1, enable_pdl, stream);
  return launch_wide<Wide>(p, enable_pdl, stream);
}

#if SMJ_CLUSTERS
constexpr int kMaxBlocks = 8;  // of a cluster, on any GPU that has clusters
constexpr int kMinWarps = 4;   // a block of fewer is not worth its messages

// Launches clusters of so many blocks, or of as many as the row's width calls for. False: they
// would be too large, or of one block, which is no cluster (see launch_shape).
template <typename Shape>
bool share(const FinalizeNormParams& p, int wanted, bool enable_pdl, cudaStream_t stream,
           cudaError_t* status) {
  constexpr int kWarpColumns = 32 * Shape::kVec * Shape::kPieces;
  const int warps = (p.sum.hidden_dim + kWarpColumns - 1) / kWarpColumns;
  const int worth = (warps + kMinWarps - 1) / kMinWarps;
  const int blocks = std::max(fewest_blocks<Shape>(p), std::min(wanted, worth));
  if (blocks < 2 || blocks > kMaxBlocks) return false;
  *status = launch_shape<Shape>(p, blocks, enable_pdl, stream);
  return true;
}

// Crossovers in tokens a multiprocessor, so that other chips scale; with other widths the number of
// blocks changes, not where it falls. H200 (132 multiprocessors), 2026-11-30, hidden 7168, top 8,
// benchmarks/results/norm_shapes.json (with hidden 4096 and 2048 too). Us, hot:
//   tokens      1     8    16    32    48    64    96   128   144   192   224   240   256
//   Tiny, 8  1.44  1.51  1.89  2.34  3.03  3.08
//   Few, 4   1.58  1.66  1.85  2.45  2.58  3.78
//   Small, 7 1.46  1.53  1.80  2.21  2.59  3.76
//   Small, 4 1.56  1.63  1.82  2.38  2.53  3.73
//   Pair     1.95  2.08  2.19  2.42  2.54  2.71  4.08  4.09  5.69  7.00  7.64  8.33  9.90
//   Many     1.50  1.57  1.82  2.20  2.58  2.88  4.16  4.22  5.29  6.74  7.72  8.03  8.80
//   Block                                  3.48  3.74  4.12  6.24  6.63  9.54 11.52 10.78
//   Spread                                 3.13  3.77  4.20  6.21  6.62  9.57 11.50 10.30
// and cold:
//   Pair                                   4.82        6.89  9.00 11.03 12.27 12.88 13.53
//   Many                                   4.64        6.85  8.02 10.59 11.93 12.56 13.21
//   Block                                  5.06        7.60 10.30 11.37 11.92 12.11 11.72
// From 2 tokens a multiprocessor on Block fills the chip at once. With FP8 output it is ahead of
// Many from 1.5 on, cold: 11.7 and 11.9 us for 208 tokens, 11.8 and 13.3 for 240.
bool launch_clusters(const FinalizeNormParams& p, int64_t num_sms, bool enable_pdl,
                     cudaStream_t stream, cudaError_t* status) {
  const int64_t tokens = p.sum.num_tokens;
  const auto up_to = [&](int64_t count, int64_t of) { return of * tokens <= count * num_sms; };
  if (up_to(1, 12) && share<Tiny>(p, 8, enable_pdl, stream, status)) return true;
  if (up_to(2, 11) && share<Few>(p, 4, enable_pdl, stream, status)) return true;
  if (up_to(3, 10) && share<Small>(p, 7, enable_pdl, stream, status)) return true;
  if (up_to(2, 5) && share<Small>(p, 4, enable_pdl, stream, status)) return true;
  const bool narrow = fewest_blocks<Narrow>(p) == 1;
  const bool second_wave = !up_to(1, 1) && up_to(3, 2);  // of one block a token, half empty
  const bool pair = narrow ? up_to(3, 5) || second_wave : up_to(1, 1);
  if (pair && share<Pair>(p, 2, enable_pdl, stream, status)) return true;
  const bool many = !narrow && (kFp8 ? up_to(3, 2) : up_to(15, 8));
  if (many && share<Many>(p, 2, enable_pdl, stream, status)) return true;
  return fewest_blocks<Block>(p) > 1 && share<Spread>(p, 2, enable_pdl, stream, status);
}
#endif

}  // namespace

cudaError_t launch_finalize_norm(const FinalizeNormParams& p, bool enable_pdl, bool allow_vector,
                                 cudaStream_t stream) {
  if (!allow_vector || !fits_columns(p, kNormLeaf)) {
    return launch_wide<Scalar>(p, enable_pdl, stream);
  }
  if (!fits_columns(p, kBroad)) return launch_wide<Odd>(p, enable_pdl, stream);
#if SMJ_CLUSTERS
  const int64_t num_sms = host::sm_count() > 0 ? host::sm_count() : 1;
  cudaError_t status;
  if (launch_clusters(p, num_sms, enable_pdl, stream, &status)) return status;
#endif
  return launch_alone(p, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
