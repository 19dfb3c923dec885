// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill.cu: the kernels of a waterfill call and their launch shapes.
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/waterfill.cuh"
#include "sgl_moe_jit/moe/waterfill_chunks.cuh"
#include "sgl_moe_jit/moe/waterfill_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

template <typename Id, typename Weight>
cudaError_t launch(const WaterfillParams& p, bool enable_pdl, cudaStream_t stream) {
  const auto run = [&](auto kernel, int64_t blocks, const auto&... args) {
    return host::launch_kernel(kernel, dim3(static_cast<unsigned>(blocks)), kWaterfillThreads,
                               enable_pdl, stream, args...);
  };
  if (p.chunk_counts == nullptr) return run(waterfill_one_block_kernel<Id, Weight>, 1, p);
  const int64_t chunks = (p.topk.num_tokens + kChunkRows - 1) / kChunkRows;
  cudaError_t status = run(waterfill_count_kernel<Id>, chunks, p);
  if (status != cudaSuccess) return status;
  status = run(waterfill_plan_kernel, 1, p, static_cast<int>(chunks));
  if (status != cudaSuccess) return status;
  return run(waterfill_write_kernel<Id, Weight>, chunks, p);
}

}  // namespace

cudaError_t launch_waterfill(const WaterfillParams& p, bool enable_pdl, cudaStream_t stream) {
  if (p.topk.num_tokens == 0) return cudaSuccess;
  if (p.topk.id_words == 2) {
    return p.topk.weight_bytes == 4 ? launch<int64_t, uint32_t>(p, enable_pdl, stream)
                                    : launch<int64_t, uint16_t>(p, enable_pdl, stream);
  }
  return p.topk.weight_bytes == 4 ? launch<int32_t, uint32_t>(p, enable_pdl, stream)
                                  : launch<int32_t, uint16_t>(p, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
