// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_cpu.cc: the CPU permute: a stable counting sort of the slots, and the copy of rows.
#include <tvm/ffi/function.h>

#include <cstring>
#include <vector>

#include "sgl_moe_jit/host/parallel_for.h"
#include "sgl_moe_jit/moe/permute_checks.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

// Writes row_of and expert_offsets; returns the end of each expert's slots, where its padding
// begins.
std::vector<int32_t> index_slots(const moe::PermuteParams& p) {
  std::vector<int32_t> next(static_cast<size_t>(p.num_experts), 0);
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    const int32_t expert = moe::expert_of_slot(p, slot);
    if (expert >= 0) ++next[static_cast<size_t>(expert)];
  }
  int32_t end = 0;
  for (int e = 0; e < p.num_experts; ++e) {
    const int32_t count = next[static_cast<size_t>(e)];
    next[static_cast<size_t>(e)] = end;
    p.expert_offsets[e] = end += moe::padded_count(p, count);
  }
  for (int64_t slot = 0; slot < p.num_slots; ++slot) {
    const int32_t expert = moe::expert_of_slot(p, slot);
    p.row_of[slot] = expert >= 0 ? next[static_cast<size_t>(expert)]++ : -1;
  }
  return next;
}

// Before there are outputs, and a copy of ids that are not contiguous.
void check(TensorView hidden, TensorView topk_ids) {
  SMJ_CHECK_VALUE(hidden.device().device_type == kDLCPU)
      << "hidden_states: expected a CPU tensor, got device " << host::device_text(hidden.device());
  moe::check_permute_inputs(hidden, topk_ids);
}

void moe_permute(TensorView permuted, TensorView row_of, TensorView expert_offsets,
                 TensorView hidden, TensorView topk_ids, int64_t alignment, int64_t threads,
                 int64_t openmp) {
  const moe::PermuteParams p = moe::check_permute(
      permuted, row_of, expert_offsets, hidden, topk_ids, host::Optional<TensorView>(), alignment);
  const std::vector<int32_t> padding = index_slots(p);
  if (p.row_bytes == 0) return;
  const host::Workers workers(threads, openmp);
  const auto row_at = [&](int64_t row) {
    return static_cast<char*>(p.permuted) + row * p.row_bytes;
  };
  const auto copy_tokens = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const char* source = static_cast<const char*>(p.hidden) + token * p.hidden_stride_bytes;
      for (int k = 0; k < p.top_k; ++k) {
        const int64_t row = p.row_of[token * p.top_k + k];
        if (row >= 0) std::memcpy(row_at(row), source, static_cast<size_t>(p.row_bytes));
      }
    }
  };
  host::parallel_for(p.num_tokens, p.row_bytes * (p.top_k + 1), workers, copy_tokens);
  if (p.alignment == 1) return;
  const auto clear_padding = [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      const int64_t first = padding[static_cast<size_t>(e)];
      std::memset(row_at(first), 0,
                  static_cast<size_t>((p.expert_offsets[e] - first) * p.row_bytes));
    }
  };
  host::parallel_for(p.num_experts, p.row_bytes * (p.alignment / 2), workers, clear_padding);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_permute, moe_permute);
