// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/ep_topk_checks.h: from the caller's tensors to EpTopkParams, or a clear error.
#pragma once

#include <limits>
#include <utility>

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/moe/ep_topk_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

// How many ranks and experts, and whose tokens; checked in Python, where the outputs' shapes
// depend on it.
struct EpShape {
  int64_t num_experts, num_ranks, source_rank, num_shared;
};

inline int32_t id_words(const char* name, const host::TensorView& x) {
  const host::DType type = host::dtype_of(x.dtype());
  SMJ_CHECK_TYPE(type == host::DType::kInt32 || type == host::DType::kInt64)
      << name << ": expected int32 or int64, got " << host::dtype_name(x.dtype());
  return type == host::DType::kInt64 ? 2 : 1;
}

inline uint32_t float_bits(host::DType type, double value) {
  const float x = static_cast<float>(value);
  if (type == host::DType::kFloat32) return host::bits_of(x);
  host::BFloat16 brain;
  host::Float16 half;
  host::store(&brain, x);
  host::store(&half, x);
  return type == host::DType::kBFloat16 ? brain.bits : half.bits;
}

// Parameters without outputs and weights: what counting needs. Whoever reads the ids checks that
// they are contiguous: a copy of others is made once all is found right.
inline EpTopkParams check_topk_ids(const host::TensorView& topk_ids,
                                   const host::Optional<host::TensorView>& num_valid,
                                   const EpShape& shape) {
  EpTopkParams p{};
  p.id_words = id_words("topk_ids", topk_ids);
  SMJ_CHECK_VALUE(topk_ids.ndim() == 2)
      << "topk_ids: expected [num_tokens, top_k], got " << host::shape_text(topk_ids);
  host::check_memory("topk_ids", topk_ids);
  const int64_t widest = std::numeric_limits<int32_t>::max();
  TVM_FFI_ICHECK(shape.num_ranks >= 1 && shape.num_ranks <= kMaxRanks &&
                 shape.num_experts >= shape.num_ranks && shape.num_shared >= 1 &&
                 shape.num_experts % shape.num_ranks == 0 && shape.source_rank >= 0 &&
                 shape.source_rank < shape.num_ranks &&
                 shape.num_experts + shape.num_ranks * shape.num_shared <= widest);
  TVM_FFI_ICHECK(topk_ids.size(0) * (topk_ids.size(1) + shape.num_shared) <= widest);
  if (num_valid.has_value()) {
    const host::TensorView& count = num_valid.value();
    p.num_valid_words = id_words("num_token_non_padded", count);
    SMJ_CHECK_VALUE(count.numel() == 1)
        << "num_token_non_padded: expected one number, got " << host::shape_text(count);
    host::check_device("num_token_non_padded", count, topk_ids.device());
    p.num_valid = count.data_ptr();
  }
  p.topk_ids = topk_ids.data_ptr();
  p.num_tokens = topk_ids.size(0);
  p.top_k = static_cast<int32_t>(topk_ids.size(1));
  p.num_experts = static_cast<int32_t>(shape.num_experts);
  p.num_ranks = static_cast<int32_t>(shape.num_ranks);
  p.experts_a_rank = p.num_experts / p.num_ranks;
  p.by_experts = divisor_of(p.experts_a_rank, p.num_experts);
  p.num_shared = static_cast<int32_t>(shape.num_shared);
  p.source_rank = static_cast<int32_t>(shape.source_rank);
  return p;
}

// The same with weights, for what writes ids and weights.
inline EpTopkParams check_ep_topk_inputs(const host::TensorView& topk_ids,
                                         const host::TensorView& topk_weights,
                                         const host::Optional<host::TensorView>& num_valid,
                                         const EpShape& shape, double shared_weight) {
  EpTopkParams p = check_topk_ids(topk_ids, num_valid, shape);
  const host::DType type = host::dtype_of(topk_weights.dtype());
  SMJ_CHECK_TYPE(host::is_float(type))
      << "topk_weights: expected float32, bfloat16 or float16, got "
      << host::dtype_name(topk_weights.dtype());
  SMJ_CHECK_VALUE(topk_weights.ndim() == 2 && topk_weights.size(0) == topk_ids.size(0) &&
                  topk_weights.size(1) == topk_ids.size(1))
      << "topk_weights: expected the shape of topk_ids, " << host::shape_text(topk_ids) << ", got "
      << host::shape_text(topk_weights);
  host::check_memory("topk_weights", topk_weights);
  host::check_device("topk_weights", topk_weights, topk_ids.device());
  p.topk_weights = topk_weights.data_ptr();
  p.weight_bytes = static_cast<int32_t>(host::item_size(type));
  p.shared_weight = float_bits(type, shared_weight);
  return p;
}

// out_ids and out_weights are this library's own allocations.
inline EpTopkParams check_ep_topk(const host::TensorView& out_ids,
                                  const host::TensorView& out_weights,
                                  const host::TensorView& topk_ids,
                                  const host::TensorView& topk_weights,
                                  const host::Optional<host::TensorView>& num_valid,
                                  const EpShape& shape, double shared_weight) {
  EpTopkParams p = check_ep_topk_inputs(topk_ids, topk_weights, num_valid, shape, shared_weight);
  host::check_contiguous("topk_ids", topk_ids);
  host::check_contiguous("topk_weights", topk_weights);
  const int64_t size = p.num_tokens * (p.top_k + p.num_shared);
  TVM_FFI_ICHECK(out_ids.numel() == size && out_weights.numel() == size);
  p.out_ids = out_ids.data_ptr();
  p.out_weights = out_weights.data_ptr();
  return p;
}

// For memory that the host can read: refuses an id at or above E before anything is written.
inline void check_ids_in_range(const EpTopkParams& p) {
  const int64_t valid = num_valid_rows(p) * p.top_k;
  for (int64_t slot = 0; slot < valid; ++slot) {
    const int64_t id = p.id_words == 2 ? static_cast<const int64_t*>(p.topk_ids)[slot]
                                       : static_cast<const int32_t*>(p.topk_ids)[slot];
    SMJ_CHECK_VALUE(id < p.num_experts)
        << "topk_ids: expected ids below " << p.num_experts << " (num_routed_experts), got " << id
        << " in row " << slot / p.top_k << "; physical experts count the redundant ones too";
  }
}

// Calls body(Id{}, Weight{}) with integers as wide as the ids and the weights.
template <typename Body>
auto with_types(const EpTopkParams& p, const Body& body) {
  if (p.id_words == 2) {
    return p.weight_bytes == 4 ? body(int64_t{}, uint32_t{}) : body(int64_t{}, uint16_t{});
  }
  return p.weight_bytes == 4 ? body(int32_t{}, uint32_t{}) : body(int32_t{}, uint16_t{});
}

}  // namespace moe
}  // namespace sgl_moe_jit
