// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_checks.h: from the caller's tensors to RouteParams, or a clear error.
#pragma once

#include <limits>

#include "sgl_moe_jit/moe/route_topk_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

struct RouteSettings {
  int64_t score_function, flags, n_group, topk_group;
  double epsilon, factor;
};

inline FloatType float_type(const char* name, const host::TensorView& x) {
  const host::DType type = host::dtype_of(x.dtype());
  SMJ_CHECK_TYPE(host::is_float(type))
      << name << ": expected float32, bfloat16 or float16, got " << host::dtype_name(x.dtype());
  if (type == host::DType::kBFloat16) return FloatType::kBFloat16;
  return type == host::DType::kFloat16 ? FloatType::kFloat16 : FloatType::kFloat32;
}

inline void check_expert_vector(const char* name, const host::TensorView& x,
                                const host::TensorView& logits) {
  SMJ_CHECK_VALUE(x.ndim() == 1 && x.size(0) == logits.size(1))
      << name << ": expected [" << logits.size(1) << "], got " << host::shape_text(x);
  host::check_contiguous(name, x);
  host::check_device(name, x, logits.device());
}

// weights and ids are this library's own allocations.
inline RouteParams check_route_topk(const host::TensorView& weights, const host::TensorView& ids,
                                    const host::TensorView& logits,
                                    const host::Optional<host::TensorView>& bias,
                                    const host::Optional<host::TensorView>& scale,
                                    const host::Optional<host::TensorView>& num_valid,
                                    int64_t valid_rows, const RouteSettings& settings) {
  RouteParams p{};
  host::check_rows("logits", logits);
  float_type("logits", logits);
  const int64_t num_experts = logits.size(1), top_k = ids.ndim() == 2 ? ids.size(1) : 0;
  SMJ_CHECK_VALUE(num_experts >= 1 && num_experts <= kRouteMaxExperts)
      << "logits: expected 1 to " << kRouteMaxExperts << " experts, got "
      << host::shape_text(logits);
  SMJ_CHECK_VALUE(top_k >= 1 && top_k <= kRouteMaxTopK)
      << "top_k: expected 1 to " << kRouteMaxTopK << ", got " << top_k;
  const int64_t n_group = settings.n_group, topk_group = settings.topk_group;
  SMJ_CHECK_VALUE(n_group >= 1 && n_group <= kRouteMaxGroups && num_experts % n_group == 0)
      << "n_group: expected a divisor of " << num_experts << " up to " << kRouteMaxGroups
      << ", got " << n_group;
  SMJ_CHECK_VALUE(topk_group >= 1 && topk_group <= n_group)
      << "topk_group: expected 1 to " << n_group << ", got " << topk_group;
  const int64_t group_size = num_experts / n_group;
  SMJ_CHECK_VALUE(top_k <= group_size * topk_group)
      << "top_k: expected at most " << group_size * topk_group << ", the experts in " << topk_group
      << " of " << n_group << " groups, got " << top_k;
  TVM_FFI_ICHECK(settings.score_function >= 0 && settings.score_function <= 2);
  const int64_t num_tokens = logits.size(0), slots = num_tokens * top_k;
  TVM_FFI_ICHECK(host::is_contiguous(weights) && host::is_contiguous(ids) &&
                 weights.numel() == slots && ids.numel() == slots &&
                 host::dtype_of(ids.dtype()) == host::DType::kInt32);
  // A block has four tokens, a grid fewer than 2^31 blocks.
  SMJ_CHECK_VALUE(num_tokens <= std::numeric_limits<int32_t>::max())
      << "logits: expected fewer than 2^31 rows, got " << num_tokens;
  if (bias.has_value()) {
    check_expert_vector("correction_bias", bias.value(), logits);
    SMJ_CHECK_TYPE(host::dtype_of(bias.value().dtype()) == host::DType::kFloat32)
        << "correction_bias: expected float32, got " << host::dtype_name(bias.value().dtype());
    p.bias = static_cast<const float*>(bias.value().data_ptr());
  }
  if (scale.has_value()) {
    check_expert_vector("expert_scale", scale.value(), logits);
    p.scale_type = float_type("expert_scale", scale.value());
    p.scale = scale.value().data_ptr();
  }
  if (num_valid.has_value()) {
    const host::TensorView& count = num_valid.value();
    const host::DType type = host::dtype_of(count.dtype());
    SMJ_CHECK_TYPE(type == host::DType::kInt32 || type == host::DType::kInt64)
        << "num_token_non_padded: expected int32 or int64, got " << host::dtype_name(count.dtype());
    SMJ_CHECK_VALUE(count.numel() == 1)
        << "num_token_non_padded: expected one number, got " << host::shape_text(count);
    host::check_device("num_token_non_padded", count, logits.device());
    p.num_valid = count.data_ptr();
    p.num_valid_words = type == host::DType::kInt64 ? 2 : 1;
  }
  p.weights = weights.data_ptr();
  p.ids = static_cast<int32_t*>(ids.data_ptr());
  p.logits = logits.data_ptr();
  p.logits_stride = host::row_stride(logits);
  p.num_tokens = num_tokens;
  p.valid_rows = valid_rows;
  p.num_experts = static_cast<int32_t>(num_experts);
  p.top_k = static_cast<int32_t>(top_k);
  p.n_group = static_cast<int32_t>(n_group);
  p.topk_group = static_cast<int32_t>(topk_group);
  p.group_size = static_cast<int32_t>(group_size);
  p.group_inverse = group_inverse(p.group_size);
  p.score_function = static_cast<ScoreFunction>(settings.score_function);
  p.weights_type = float_type("weights", weights);
  p.flags = static_cast<int32_t>(settings.flags);
  p.epsilon = static_cast<float>(settings.epsilon);
  p.factor = static_cast<float>(settings.factor);
  return p;
}

}  // namespace moe
}  // namespace sgl_moe_jit
