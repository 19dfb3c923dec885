// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_checks.h: from the caller's tensors to PermuteParams, or a clear error.
#pragma once

#include <limits>

#include "sgl_moe_jit/moe/permute_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

// All but that the ids are contiguous: a copy of them is made once they are found right.
inline void check_permute_inputs(const host::TensorView& hidden, const host::TensorView& topk_ids) {
  using host::DType;
  const DLDataType type = hidden.dtype();
  SMJ_CHECK_TYPE(type.lanes == 1 && (type.bits == 16 || type.bits == 32 || type.bits == 64))
      << "hidden_states: expected items of 2, 4 or 8 bytes, got " << host::dtype_name(type);
  const DType ids = host::dtype_of(topk_ids.dtype());
  SMJ_CHECK_TYPE(ids == DType::kInt32 || ids == DType::kInt64)
      << "topk_ids: expected int32 or int64, got " << host::dtype_name(topk_ids.dtype());
  host::check_rows("hidden_states", hidden);
  SMJ_CHECK_VALUE(topk_ids.ndim() == 2 && topk_ids.size(0) == hidden.size(0))
      << "topk_ids: expected [num_tokens=" << hidden.size(0) << ", top_k], got "
      << host::shape_text(topk_ids);
  const int64_t top_k = topk_ids.size(1);
  SMJ_CHECK_VALUE(topk_ids.numel() <= std::numeric_limits<int32_t>::max() &&
                  top_k <= std::numeric_limits<int32_t>::max())
      << "topk_ids: expected num_tokens * top_k below 2^31, got " << host::shape_text(topk_ids);
  host::check_memory("topk_ids", topk_ids);
  host::check_device("topk_ids", topk_ids, hidden.device());
  // A launch's second grid dimension ends at 65535; 128 words of 2 bytes each is the narrowest.
  SMJ_CHECK_VALUE(hidden.size(1) <= 65535 * int64_t{128})
      << "hidden_states: expected at most " << 65535 * 128 << " columns, got " << hidden.size(1);
}

// permuted, row_of, expert_offsets and scratch are this library's own allocations.
inline PermuteParams check_permute(const host::TensorView& permuted, const host::TensorView& row_of,
                                   const host::TensorView& expert_offsets,
                                   const host::TensorView& hidden, const host::TensorView& topk_ids,
                                   const host::Optional<host::TensorView>& scratch,
                                   int64_t alignment) {
  check_permute_inputs(hidden, topk_ids);
  host::check_contiguous("topk_ids", topk_ids);
  const int64_t num_experts = expert_offsets.numel();
  SMJ_CHECK_VALUE(num_experts >= 1 && num_experts <= kMaxExperts)
      << "num_experts: expected 1 to " << kMaxExperts << ", got " << num_experts;
  const int64_t num_slots = topk_ids.numel(), item_bytes = hidden.dtype().bits / 8;

  // An expert's counters, one a chunk, and behind all of them its count.
  int32_t *counters = nullptr, *counts = nullptr;
  int64_t num_chunks = 0;
  if (scratch.has_value()) {
    num_chunks = scratch.value().numel() / num_experts - 1;
    counters = static_cast<int32_t*>(scratch.value().data_ptr());
    counts = counters + num_experts * num_chunks;
  }
  // Python has checked what decides the outputs' shapes.
  TVM_FFI_ICHECK(alignment >= 1 && alignment <= kMaxAlignment);
  const int64_t num_rows = max_rows(num_slots, num_experts, alignment);
  TVM_FFI_ICHECK(num_rows <= std::numeric_limits<int32_t>::max());
  TVM_FFI_ICHECK(host::is_contiguous(permuted) && permuted.numel() == num_rows * hidden.size(1) &&
                 row_of.numel() == num_slots && num_chunks >= 0);
  return PermuteParams{
      permuted.data_ptr(),
      static_cast<int32_t*>(row_of.data_ptr()),
      static_cast<int32_t*>(expert_offsets.data_ptr()),
      hidden.data_ptr(),
      topk_ids.data_ptr(),
      counters,
      counts,
      hidden.size(0),
      num_slots,
      hidden.size(1) * item_bytes,
      host::row_stride(hidden) * item_bytes,
      static_cast<int32_t>(item_bytes),
      static_cast<int32_t>(topk_ids.size(1)),
      static_cast<int32_t>(num_experts),
      static_cast<int32_t>(alignment),
      static_cast<int32_t>(num_chunks),
      host::dtype_of(topk_ids.dtype()) == host::DType::kInt64 ? 2 : 1,
  };
}

// The path is chosen in Python, beside the scratch memory it needs.
inline PermutePath check_permute_path(const PermuteParams& p, int64_t path) {
  const auto chosen = static_cast<PermutePath>(path);
  if (chosen == PermutePath::kOneLaunch) {
    SMJ_CHECK_VALUE(p.num_slots <= kOneLaunchMaxSlots && p.num_experts <= kOneLaunchMaxExperts &&
                    p.top_k <= kOneLaunchMaxTopK)
        << "path: one launch takes at most " << kOneLaunchMaxSlots << " slots, "
        << kOneLaunchMaxExperts << " experts and top_k " << kOneLaunchMaxTopK << ", got "
        << p.num_slots << ", " << p.num_experts << " and " << p.top_k;
  } else if (chosen == PermutePath::kTwoLaunches) {
    TVM_FFI_ICHECK(p.alignment == 1 || p.counts != nullptr);
  } else {
    TVM_FFI_ICHECK(chosen == PermutePath::kFourLaunches && p.num_chunks > 0) << "path " << path;
  }
  return chosen;
}

}  // namespace moe
}  // namespace sgl_moe_jit
