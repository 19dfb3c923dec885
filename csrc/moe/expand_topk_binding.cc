// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/expand_topk_binding.cc: the TVM-FFI door of expanding and counting on CUDA.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/ep_topk_checks.h"
#include "sgl_moe_jit/moe/expand_topk_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

void expand_topk(TensorView out_ids, TensorView out_weights, TensorView topk_ids,
                 TensorView topk_weights, host::Optional<TensorView> num_valid, int64_t num_experts,
                 int64_t num_ranks, int64_t source_rank, int64_t num_shared, double shared_weight,
                 bool enable_pdl) {
  host::check_is_cuda("topk_ids", topk_ids);
  const moe::EpShape shape{num_experts, num_ranks, source_rank, num_shared};
  const moe::EpTopkParams params = moe::check_ep_topk(out_ids, out_weights, topk_ids, topk_weights,
                                                      num_valid, shape, shared_weight);
  host::DeviceGuard guard(topk_ids.device().device_id);
  host::check_cuda(
      moe::launch_expand_topk(params, enable_pdl, host::current_stream(topk_ids.device())),
      "expand_topk_with_shared_expert");
}

void count_ranks(TensorView counts, TensorView topk_ids, host::Optional<TensorView> num_valid,
                 int64_t num_experts, int64_t num_ranks, int64_t source_rank, bool enable_pdl) {
  host::check_is_cuda("topk_ids", topk_ids);
  const moe::EpTopkParams params =
      moe::check_topk_ids(topk_ids, num_valid, {num_experts, num_ranks, source_rank, 1});
  host::check_contiguous("topk_ids", topk_ids);
  TVM_FFI_ICHECK(counts.numel() == 2 * num_ranks);
  host::DeviceGuard guard(topk_ids.device().device_id);
  host::check_cuda(moe::launch_count_ranks(params, static_cast<int64_t*>(counts.data_ptr()),
                                           enable_pdl, host::current_stream(topk_ids.device())),
                   "count_tokens_per_rank");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(expand_topk, expand_topk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_ranks, count_ranks);
