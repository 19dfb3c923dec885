// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_checks.h: from the caller's tensors to WaterfillParams, or a clear error.
#pragma once

#include <algorithm>

#include "sgl_moe_jit/moe/ep_topk_checks.h"
#include "sgl_moe_jit/moe/waterfill_params.h"

namespace sgl_moe_jit {
namespace moe {

inline const int64_t* check_counts(const char* name, const host::Optional<host::TensorView>& x,
                                   const EpTopkParams& p, DLDevice device) {
  if (!x.has_value()) return nullptr;
  const host::TensorView& counts = x.value();
  SMJ_CHECK_TYPE(host::dtype_of(counts.dtype()) == host::DType::kInt64)
      << name << ": expected int64, got " << host::dtype_name(counts.dtype());
  SMJ_CHECK_VALUE(counts.ndim() == 1 && counts.size(0) == p.num_ranks)
      << name << ": expected [world_size=" << p.num_ranks << "], got " << host::shape_text(counts);
  host::check_contiguous(name, counts);
  host::check_device(name, counts, device);
  return static_cast<const int64_t*>(counts.data_ptr());
}

// Both counts are there, or none: Python has checked that.
inline WaterfillParams check_waterfill(const EpTopkParams& topk, DLDevice device,
                                       const host::Optional<host::TensorView>& global_counts,
                                       const host::Optional<host::TensorView>& tokens_per_rank,
                                       int64_t mode, int64_t remainder_start) {
  TVM_FFI_ICHECK(mode >= 0 && mode <= static_cast<int64_t>(WaterfillMode::kSampled));
  TVM_FFI_ICHECK(global_counts.has_value() == tokens_per_rank.has_value());
  TVM_FFI_ICHECK(remainder_start >= 0 && remainder_start < topk.num_ranks);
  WaterfillParams p{};
  p.topk = topk;
  p.global_counts = check_counts("global_counts", global_counts, topk, device);
  p.tokens_per_rank = check_counts("tokens_per_rank", tokens_per_rank, topk, device);
  p.by_top_k = divisor_of(topk.top_k, std::max(kOneBlockIds, kChunkRows * int64_t{topk.top_k}));
  p.mode = static_cast<WaterfillMode>(mode);
  p.remainder_start = static_cast<int32_t>(remainder_start);
  return p;
}

}  // namespace moe
}  // namespace sgl_moe_jit
