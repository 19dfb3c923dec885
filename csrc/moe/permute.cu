// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute.cu: which kernels serve a permute call.
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/permute.cuh"
#include "sgl_moe_jit/moe/permute_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

template <typename Word>
cudaError_t launch_gather(const PermuteParams& p, bool enable_pdl, cudaStream_t stream) {
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const auto columns = static_cast<unsigned>((words + kGatherThreads - 1) / kGatherThreads);
  return host::launch_kernel(gather_kernel<Word>,
                             dim3(static_cast<unsigned>(p.num_tokens), columns), kGatherThreads,
                             enable_pdl, stream, p);
}

// The widest access, up to 16 bytes, that every row of both matrices can be cut into.
int64_t word_bytes(const PermuteParams& p, bool allow_vector) {
  const uint64_t together =
      reinterpret_cast<uintptr_t>(p.hidden) | reinterpret_cast<uintptr_t>(p.permuted) |
      static_cast<uint64_t>(p.hidden_stride_bytes) | static_cast<uint64_t>(p.row_bytes);
  int64_t bytes = allow_vector ? 16 : p.item_bytes;
  while (together % static_cast<uint64_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

}  // namespace

cudaError_t launch_permute(const PermuteParams& p, bool enable_pdl, bool allow_vector,
                           cudaStream_t stream) {
  const auto launch = [&](void (*kernel)(PermuteParams), int blocks, int threads) {
    return host::launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)),
                               static_cast<unsigned>(threads), enable_pdl, stream, p);
  };
  cudaError_t status = cudaSuccess;
  if (p.num_chunks == 0) {
    status = launch(index_kernel, 1, warps_that_fit(p.num_experts, kIndexMaxWarps) * kWarp);
  } else {
    const int warps = warps_that_fit(p.num_experts, kChunkMaxWarps);
    const int blocks = (p.num_chunks + warps - 1) / warps;
    status = launch(count_kernel, blocks, warps * kWarp);
    if (status == cudaSuccess) status = launch(scan_kernel, p.num_experts, kScanThreads);
    if (status == cudaSuccess) status = launch(rank_kernel, blocks, warps * kWarp);
  }
  if (status != cudaSuccess || p.num_slots == 0 || p.row_bytes == 0) return status;
  switch (word_bytes(p, allow_vector)) {
    case 16:
      return launch_gather<uint4>(p, enable_pdl, stream);
    case 8:
      return launch_gather<uint2>(p, enable_pdl, stream);
    case 4:
      return launch_gather<uint32_t>(p, enable_pdl, stream);
    default:
      return launch_gather<uint16_t>(p, enable_pdl, stream);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
