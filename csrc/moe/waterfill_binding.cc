// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_binding.cc: the TVM-FFI door of the CUDA waterfill: validate, guard, launch.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/waterfill_checks.h"
#include "sgl_moe_jit/moe/waterfill_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

// Scratch memory is chosen in Python, and with it the path: the plan, then each chunk's counts.
void take_scratch(moe::WaterfillParams* p, const host::Optional<TensorView>& scratch) {
  const int64_t rows = p->topk.num_tokens;
  if (!scratch.has_value()) {
    const bool restricted = p->mode == moe::WaterfillMode::kRestricted;
    TVM_FFI_ICHECK(rows <= (restricted ? moe::kChunkRows : moe::kOneBlockRows) &&
                   rows * p->topk.top_k <= moe::kOneBlockIds);
    return;
  }
  constexpr int64_t kPlanItems = sizeof(moe::WaterfillPlan) / sizeof(int32_t);
  const int64_t chunks = (rows + moe::kChunkRows - 1) / moe::kChunkRows;
  TVM_FFI_ICHECK(scratch.value().numel() == kPlanItems + chunks * (p->topk.num_ranks + 1));
  int32_t* items = static_cast<int32_t*>(scratch.value().data_ptr());
  p->plan = reinterpret_cast<int64_t*>(items);
  p->chunk_counts = items + kPlanItems;
}

void waterfill_topk(TensorView out_ids, TensorView out_weights, TensorView topk_ids,
                    TensorView topk_weights, host::Optional<TensorView> num_valid,
                    int64_t num_experts, int64_t num_ranks, int64_t source_rank,
                    double shared_weight, host::Optional<TensorView> global_counts,
                    host::Optional<TensorView> tokens_per_rank, int64_t mode,
                    int64_t remainder_start, host::Optional<TensorView> scratch, bool enable_pdl) {
  host::check_is_cuda("topk_ids", topk_ids);
  const moe::EpShape shape{num_experts, num_ranks, source_rank, 1};
  moe::WaterfillParams params = moe::check_waterfill(
      moe::check_ep_topk(out_ids, out_weights, topk_ids, topk_weights, num_valid, shape,
                         shared_weight),
      topk_ids.device(), global_counts, tokens_per_rank, mode, remainder_start);
  take_scratch(&params, scratch);
  host::DeviceGuard guard(topk_ids.device().device_id);
  host::check_cuda(
      moe::launch_waterfill(params, enable_pdl, host::current_stream(topk_ids.device())),
      "waterfill_topk_with_shared_expert");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(waterfill_topk, waterfill_topk);
