// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_checks.h: from the caller's tensors to FinalizeNormParams, or a clear error.
//
// The one place that checks what both kernels rely on beyond a plain finalize (finalize_checks.h).
#pragma once

#include <cmath>

#include "sgl_moe_jit/moe/finalize_checks.h"
#include "sgl_moe_jit/moe/finalize_norm_params.h"

namespace sgl_moe_jit {
namespace moe {

struct FinalizeNormCall {
  FinalizeNormParams params;
  host::DType activation;
  host::DType expert_weight;  // kNone: all weights are 1
};

// What a norm reads beside a finalize's inputs.
struct NormInputs {
  const host::TensorView& residual;
  const host::TensorView& weight;
};

// What it writes. With a scale, out is float8_e4m3fn.
struct NormOutputs {
  const host::TensorView& out;
  const host::TensorView& residual_out;
  const host::Optional<host::TensorView>& scale;
};

// Where an argument lies.
struct NormRange {
  const char* name;
  const host::TensorView& tensor;
  host::RowBytes bytes;
};

inline NormRange range_of(const char* name, const host::TensorView& x) {
  return {name, x, host::row_bytes(x)};
}

// written may share no memory with other; or only if it is exactly other, where may_be says so.
inline void check_disjoint(const NormRange& written, const NormRange& other, bool may_be) {
  if (!written.bytes.overlaps(other.bytes)) return;
  const bool same = written.tensor.data_ptr() == other.tensor.data_ptr() &&
                    written.tensor.dtype() == other.tensor.dtype() &&
                    host::row_stride(written.tensor) == host::row_stride(other.tensor);
  SMJ_CHECK_VALUE(may_be) << written.name << ": shares memory with " << other.name
                          << "; pass another tensor";
  SMJ_CHECK_VALUE(same) << written.name << ": shares part of its memory with " << other.name
                        << "; pass exactly " << other.name << ", or another tensor";
}

inline void check_norm_memory(const FinalizeInputs& in, const NormInputs& norm,
                              const NormOutputs& to) {
  const NormRange out = range_of("out", to.out);
  const NormRange sum = range_of("residual_out", to.residual_out);
  const auto apart = [&](const NormRange& read, bool out_may_be, bool sum_may_be) {
    check_disjoint(out, read, out_may_be);
    check_disjoint(sum, read, sum_may_be);
    if (to.scale.has_value()) {
      check_disjoint(range_of("out_scale", to.scale.value()), read, false);
    }
  };
  apart(range_of("gemm2_out", in.gemm2_out), false, false);
  apart(range_of("expanded_idx_to_permuted_idx", in.row_of), false, false);
  if (in.weights.has_value()) apart(range_of("expert_weights", in.weights.value()), false, false);
  if (in.shared.has_value()) {
    apart(range_of("shared_output", in.shared.value()), !to.scale.has_value(), false);
  }
  if (in.gate_logits.has_value()) {
    apart(range_of("shared_gate_logits", in.gate_logits.value()), false, false);
  }
  apart(range_of("residual", norm.residual), false, true);
  apart(range_of("weight", norm.weight), false, false);
  check_disjoint(sum, out, false);
  if (to.scale.has_value()) {
    const NormRange scale = range_of("out_scale", to.scale.value());
    check_disjoint(scale, out, false);
    check_disjoint(scale, sum, false);
  }
}

inline void check_fp8_output(const host::TensorView& out, const host::TensorView& scale,
                             int64_t num_tokens, int64_t hidden_dim, DLDevice device) {
  SMJ_CHECK_TYPE(out.dtype().code == kDLFloat8_e4m3fn && out.dtype().lanes == 1)
      << "out: expected float8_e4m3fn, got " << host::dtype_name(out.dtype());
  host::check_rows("out", out);
  SMJ_CHECK_VALUE(out.size(0) == num_tokens && out.size(1) == hidden_dim)
      << "out: expected [" << num_tokens << ", " << hidden_dim << "], got "
      << host::shape_text(out);
  host::check_device("out", out, device);
  SMJ_CHECK_TYPE(host::dtype_of(scale.dtype()) == host::DType::kFloat32)
      << "out_scale: expected float32, got " << host::dtype_name(scale.dtype());
  SMJ_CHECK_VALUE(scale.ndim() == 2 && scale.size(0) == num_tokens && scale.size(1) == 1)
      << "out_scale: expected [" << num_tokens << ", 1], got " << host::shape_text(scale);
  host::check_contiguous("out_scale", scale);
  host::check_device("out_scale", scale, device);
}

// Everything but the outputs, which check_finalize_norm fills in.
inline FinalizeNormCall check_norm_inputs(const FinalizeInputs& in, const NormInputs& norm,
                                          int64_t top_k, double routed_factor, double eps) {
  host::check_rows("residual", norm.residual);
  const int64_t hidden_dim = norm.residual.size(1);
  const FinalizeCall sum = check_finalize_inputs(in, hidden_dim, "residual", top_k, routed_factor);
  const int64_t num_tokens = sum.params.num_tokens;
  SMJ_CHECK_VALUE(hidden_dim <= kMaxNormHidden)
      << "residual: expected a width of at most " << kMaxNormHidden << ", got " << hidden_dim
      << "; take moe_finalize_fuse_shared and a norm of its own";
  check_token_rows("residual", norm.residual, in.gemm2_out, num_tokens, hidden_dim, "");
  const host::TensorView& weight = norm.weight;
  check_activation("weight", weight, in.gemm2_out.dtype());
  SMJ_CHECK_VALUE(weight.ndim() == 1 && weight.size(0) == hidden_dim)
      << "weight: expected [" << hidden_dim << "], got " << host::shape_text(weight);
  host::check_contiguous("weight", weight);
  host::check_device("weight", weight, in.gemm2_out.device());
  SMJ_CHECK_VALUE(static_cast<float>(eps) > 0.0f && std::isfinite(static_cast<float>(eps)))
      << "eps: expected a positive number, got " << eps;

  FinalizeNormCall call{};
  call.activation = sum.activation;
  call.expert_weight = sum.weight;
  FinalizeNormParams& p = call.params;
  p.sum = sum.params;
  p.residual = norm.residual.data_ptr();
  p.residual_stride = host::row_stride(norm.residual);
  p.norm_weight = weight.data_ptr();
  p.eps = static_cast<float>(eps);
  return call;
}

inline FinalizeNormCall check_finalize_norm(const NormOutputs& to, const FinalizeInputs& in,
                                            const NormInputs& norm, int64_t top_k,
                                            double routed_factor, double eps) {
  FinalizeNormCall call = check_norm_inputs(in, norm, top_k, routed_factor, eps);
  FinalizeNormParams& p = call.params;
  const int64_t num_tokens = p.sum.num_tokens, hidden_dim = p.sum.hidden_dim;
  check_token_rows("residual_out", to.residual_out, in.gemm2_out, num_tokens, hidden_dim, "");
  check_written_rows("residual_out", to.residual_out, num_tokens);
  if (to.scale.has_value()) {
    check_fp8_output(to.out, to.scale.value(), num_tokens, hidden_dim, in.gemm2_out.device());
  } else {
    check_token_rows("out", to.out, in.gemm2_out, num_tokens, hidden_dim, "");
  }
  check_written_rows("out", to.out, num_tokens);
  check_norm_memory(in, norm, to);

  p.sum.out = to.out.data_ptr();
  p.sum.out_stride = host::row_stride(to.out);
  p.residual_out = to.residual_out.data_ptr();
  p.residual_out_stride = host::row_stride(to.residual_out);
  p.scale = to.scale.has_value() ? static_cast<float*>(to.scale.value().data_ptr()) : nullptr;
  return call;
}

}  // namespace moe
}  // namespace sgl_moe_jit
