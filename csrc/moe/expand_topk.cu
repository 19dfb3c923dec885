// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/expand_topk.cu: the launch shapes of expanding and counting.
#include <algorithm>

#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/expand_topk.cuh"
#include "sgl_moe_jit/moe/expand_topk_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

// Ids for which one block is enough: more blocks cost a second launch, which zeroes the counts.
// Not swept on a device yet.
constexpr int64_t kOneBlockIds = 16384;

template <typename Id, typename Weight>
cudaError_t launch_expand(const EpTopkParams& p, bool enable_pdl, cudaStream_t stream) {
  const int64_t items = p.num_tokens * (p.top_k + p.num_shared);
  const dim3 grid(static_cast<unsigned>((items + kExpandThreads - 1) / kExpandThreads));
  return host::launch_kernel(expand_topk_kernel<Id, Weight>, grid, kExpandThreads, enable_pdl,
                             stream, p);
}

template <typename Weight>
cudaError_t launch_expand(const EpTopkParams& p, bool enable_pdl, cudaStream_t stream) {
  return p.id_words == 2 ? launch_expand<int64_t, Weight>(p, enable_pdl, stream)
                         : launch_expand<int32_t, Weight>(p, enable_pdl, stream);
}

}  // namespace

cudaError_t launch_expand_topk(const EpTopkParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  return p.weight_bytes == 4 ? launch_expand<uint32_t>(p, enable_pdl, stream)
                             : launch_expand<uint16_t>(p, enable_pdl, stream);
}

cudaError_t launch_count_ranks(const EpTopkParams& p, int64_t* counts, bool enable_pdl,
                               cudaStream_t stream) {
  const int64_t ids = p.num_tokens * std::max(p.top_k, 1);
  int64_t blocks = 1;
  if (ids > kOneBlockIds) {
    blocks = std::min<int64_t>((ids + kOneBlockIds - 1) / kOneBlockIds * 8, host::sm_count());
    blocks = std::max<int64_t>(blocks, 2);  // one block would not need the zeros
    const size_t bytes = static_cast<size_t>(2 * p.num_ranks) * sizeof(int64_t);
    const cudaError_t status = cudaMemsetAsync(counts, 0, bytes, stream);
    if (status != cudaSuccess) return status;
  }
  // Programmatic launch follows a kernel, not the zeroing.
  const bool after_kernel = enable_pdl && blocks == 1;
  const auto kernel = p.id_words == 2 ? count_ranks_kernel<int64_t> : count_ranks_kernel<int32_t>;
  return host::launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kCountThreads,
                             after_kernel, stream, p,
                             reinterpret_cast<unsigned long long*>(counts));
}

}  // namespace moe
}  // namespace sgl_moe_jit
