// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_checks.h: from the caller's tensors to FinalizeParams, or a clear error.
//
// The one place that checks what both kernels rely on: dtypes, shapes, strides, device, aliasing.
#pragma once

#include <limits>

#include "sgl_moe_jit/moe/finalize_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

struct FinalizeCall {
  FinalizeParams params;
  host::DType activation;
  host::DType weight;
};

inline void check_activation(const char* name, const host::TensorView& x, DLDataType expected) {
  SMJ_CHECK_TYPE(x.dtype().code == expected.code && x.dtype().bits == expected.bits)
      << name << ": expected " << host::dtype_name(expected) << " like gemm2_out, got "
      << host::dtype_name(x.dtype()) << "; convert it with .to()";
}

inline FinalizeCall check_finalize(const host::TensorView& out, const host::TensorView& gemm2_out,
                                   const host::TensorView& row_of, const host::TensorView& weights,
                                   const host::Optional<host::TensorView>& shared, int64_t top_k,
                                   double routed_factor) {
  using host::DType;
  FinalizeCall call{};
  call.activation = host::dtype_of(gemm2_out.dtype());
  SMJ_CHECK_TYPE(call.activation == DType::kBFloat16 || call.activation == DType::kFloat32)
      << "gemm2_out: expected bfloat16 or float32, got " << host::dtype_name(gemm2_out.dtype());
  SMJ_CHECK_TYPE(host::dtype_of(row_of.dtype()) == DType::kInt32)
      << "expanded_idx_to_permuted_idx: expected int32, got " << host::dtype_name(row_of.dtype())
      << "; convert it with .int()";
  call.weight = host::dtype_of(weights.dtype());
  SMJ_CHECK_TYPE(call.weight == DType::kBFloat16 || call.weight == DType::kFloat32)
      << "expert_weights: expected float32 or bfloat16, got " << host::dtype_name(weights.dtype());

  SMJ_CHECK_VALUE(top_k >= 1 && top_k <= kMaxTopK)
      << "top_k: expected 1 to " << kMaxTopK << ", got " << top_k;
  host::check_rows("gemm2_out", gemm2_out);
  SMJ_CHECK_VALUE(weights.ndim() == 2 && weights.size(1) == top_k)
      << "expert_weights: expected [num_tokens, top_k=" << top_k << "], got "
      << host::shape_text(weights);
  host::check_contiguous("expert_weights", weights);
  const int64_t num_tokens = weights.size(0);
  SMJ_CHECK_VALUE(num_tokens <= std::numeric_limits<int32_t>::max() / top_k)
      << "expert_weights: expected num_tokens * top_k below 2^31, got " << num_tokens << " * "
      << top_k;
  const bool flat = row_of.ndim() == 1 && row_of.size(0) == num_tokens * top_k;
  const bool matrix = row_of.ndim() == 2 && row_of.size(0) == num_tokens && row_of.size(1) == top_k;
  SMJ_CHECK_VALUE(flat || matrix) << "expanded_idx_to_permuted_idx: expected [num_tokens="
                                  << num_tokens << ", top_k=" << top_k << "] or its flat form, got "
                                  << host::shape_text(row_of);
  host::check_contiguous("expanded_idx_to_permuted_idx", row_of);

  host::check_rows("out", out);
  check_activation("out", out, gemm2_out.dtype());
  const int64_t hidden_dim = out.size(1);
  if (shared.has_value()) {
    const host::TensorView& s = shared.value();
    host::check_rows("shared_output", s);
    check_activation("shared_output", s, gemm2_out.dtype());
    SMJ_CHECK_VALUE(s.size(0) == num_tokens && s.size(1) == hidden_dim)
        << "shared_output: expected [" << num_tokens << ", " << hidden_dim << "], got "
        << host::shape_text(s) << "; pass None for no shared expert";
    host::check_device("shared_output", s, gemm2_out.device());
  }
  SMJ_CHECK_VALUE(hidden_dim >= 1 && hidden_dim <= gemm2_out.size(1))
      << (shared.has_value() ? "shared_output" : "hidden_dim") << ": expected a width of 1 to "
      << gemm2_out.size(1) << " (the width of gemm2_out), got " << hidden_dim;
  SMJ_CHECK_VALUE(hidden_dim <= kMaxHiddenDim)
      << (shared.has_value() ? "shared_output" : "hidden_dim") << ": expected a width of at most "
      << kMaxHiddenDim << ", got " << hidden_dim;
  SMJ_CHECK_VALUE(out.size(0) == num_tokens) << "out: expected [" << num_tokens << ", "
                                             << hidden_dim << "], got " << host::shape_text(out);
  SMJ_CHECK_VALUE(num_tokens <= 1 || out.stride(0) >= hidden_dim)
      << "out: expected rows that do not overlap, got row stride " << out.stride(0);
  host::check_device("expanded_idx_to_permuted_idx", row_of, gemm2_out.device());
  host::check_device("expert_weights", weights, gemm2_out.device());
  host::check_device("out", out, gemm2_out.device());

  const host::ByteRange written = host::bytes_of_rows(out);
  const auto check_apart = [&written](const char* name, const host::ByteRange& read) {
    SMJ_CHECK_VALUE(!written.overlaps(read))
        << "out: shares memory with " << name << "; pass another tensor";
  };
  check_apart("gemm2_out", host::bytes_of_rows(gemm2_out));
  check_apart("expanded_idx_to_permuted_idx", host::bytes_of_contiguous(row_of));
  check_apart("expert_weights", host::bytes_of_contiguous(weights));
  if (shared.has_value()) {
    const host::TensorView& s = shared.value();
    const bool same =
        s.data_ptr() == out.data_ptr() && host::row_stride(s) == host::row_stride(out);
    SMJ_CHECK_VALUE(same || !written.overlaps(host::bytes_of_rows(s)))
        << "out: shares part of its memory with shared_output; pass exactly shared_output, or "
           "another tensor";
  }

  call.params = FinalizeParams{
      out.data_ptr(),
      gemm2_out.data_ptr(),
      static_cast<const int32_t*>(row_of.data_ptr()),
      weights.data_ptr(),
      shared.has_value() ? shared.value().data_ptr() : nullptr,
      host::row_stride(out),
      host::row_stride(gemm2_out),
      shared.has_value() ? host::row_stride(shared.value()) : 0,
      num_tokens,
      gemm2_out.size(0),
      static_cast<int32_t>(hidden_dim),
      static_cast<int32_t>(top_k),
      static_cast<float>(routed_factor),
  };
  return call;
}

}  // namespace moe
}  // namespace sgl_moe_jit
