// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/expand_topk_cpu.cc: expanding and counting on a CPU, row after row.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "sgl_moe_jit/host/parallel_for.h"
#include "sgl_moe_jit/moe/ep_topk_checks.h"
#include "sgl_moe_jit/moe/ep_topk_cpu.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

void check_is_cpu(const TensorView& topk_ids) {
  SMJ_CHECK_VALUE(topk_ids.device().device_type == kDLCPU)
      << "topk_ids: expected a CPU tensor, got device " << host::device_text(topk_ids.device());
}

// Before there are outputs, and copies of what is not contiguous. Without weights: of a count.
void check(TensorView topk_ids, host::Optional<TensorView> topk_weights,
           host::Optional<TensorView> num_valid, int64_t num_experts, int64_t num_ranks,
           int64_t source_rank, int64_t num_shared) {
  check_is_cpu(topk_ids);
  const moe::EpShape shape{num_experts, num_ranks, source_rank, num_shared};
  const moe::EpTopkParams p =
      topk_weights.has_value()
          ? moe::check_ep_topk_inputs(topk_ids, topk_weights.value(), num_valid, shape, 1.0)
          : moe::check_topk_ids(topk_ids, num_valid, shape);
  if (host::is_contiguous(topk_ids)) moe::check_ids_in_range(p);
}

void expand_topk(TensorView out_ids, TensorView out_weights, TensorView topk_ids,
                 TensorView topk_weights, host::Optional<TensorView> num_valid, int64_t num_experts,
                 int64_t num_ranks, int64_t source_rank, int64_t num_shared, double shared_weight,
                 int64_t threads, int64_t openmp) {
  check_is_cpu(topk_ids);
  const moe::EpShape shape{num_experts, num_ranks, source_rank, num_shared};
  const moe::EpTopkParams p = moe::check_ep_topk(out_ids, out_weights, topk_ids, topk_weights,
                                                 num_valid, shape, shared_weight);
  moe::check_ids_in_range(p);
  moe::with_types(p, [&](auto id, auto weight) {
    using Id = decltype(id);
    using Weight = decltype(weight);
    const auto expand = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        moe::write_row<Id, Weight>(p, row, p.source_rank);
      }
    };
    const int64_t row_bytes = (2 * p.top_k + p.num_shared) * (4 * p.id_words + p.weight_bytes);
    host::parallel_for(p.num_tokens, row_bytes, host::Workers(threads, openmp), expand);
  });
}

void count_ranks(TensorView counts, TensorView topk_ids, host::Optional<TensorView> num_valid,
                 int64_t num_experts, int64_t num_ranks, int64_t source_rank) {
  check_is_cpu(topk_ids);
  const moe::EpTopkParams p =
      moe::check_topk_ids(topk_ids, num_valid, {num_experts, num_ranks, source_rank, 1});
  host::check_contiguous("topk_ids", topk_ids);
  TVM_FFI_ICHECK(counts.numel() == 2 * num_ranks);
  moe::check_ids_in_range(p);
  int64_t* sums = static_cast<int64_t*>(counts.data_ptr());
  std::fill(sums, sums + 2 * num_ranks, 0);
  if (p.id_words == 2) {
    sums[num_ranks + source_rank] = moe::count_pairs<int64_t>(p, sums);
  } else {
    sums[num_ranks + source_rank] = moe::count_pairs<int32_t>(p, sums);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expand_topk, expand_topk);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(count_ranks, count_ranks);
