// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_checks.h: from the caller's tensors to FinalizeParams, or a clear error.
//
// The one place that checks what the kernels rely on: dtypes, shapes, strides, device, aliasing.
#pragma once

#include <limits>

#include "sgl_moe_jit/moe/finalize_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

struct FinalizeCall {
  FinalizeParams params;
  host::DType activation;
  host::DType weight;  // kNone: all weights are 1
};

// What a finalize reads. Absent tensors: all weights 1, no shared row, no gate.
struct FinalizeInputs {
  const host::TensorView& gemm2_out;
  const host::TensorView& row_of;
  const host::Optional<host::TensorView>& weights;
  const host::Optional<host::TensorView>& shared;
  const host::Optional<host::TensorView>& gate_logits;
};

inline void check_activation(const char* name, const host::TensorView& x, DLDataType expected) {
  SMJ_CHECK_TYPE(x.dtype().code == expected.code && x.dtype().bits == expected.bits)
      << name << ": expected " << host::dtype_name(expected) << " like gemm2_out, got "
      << host::dtype_name(x.dtype()) << "; convert it with .to()";
}

inline host::DType check_float(const char* name, const host::TensorView& x) {
  const host::DType dtype = host::dtype_of(x.dtype());
  SMJ_CHECK_TYPE(host::is_float(dtype)) << name << ": expected bfloat16, float16 or float32, got "
                                        << host::dtype_name(x.dtype()) << "; convert it with .to()";
  return dtype;
}

// T, from the weights where there are any, else from the indices.
inline int64_t check_routing(const FinalizeInputs& in, int64_t top_k) {
  using host::DType;
  const host::TensorView& row_of = in.row_of;
  SMJ_CHECK_TYPE(host::dtype_of(row_of.dtype()) == DType::kInt32)
      << "expanded_idx_to_permuted_idx: expected int32, got " << host::dtype_name(row_of.dtype())
      << "; convert it with .int()";
  SMJ_CHECK_VALUE(top_k >= 1 && top_k <= kMaxTopK)
      << "top_k: expected 1 to " << kMaxTopK << ", got " << top_k;
  int64_t num_tokens = row_of.ndim() == 2 ? row_of.size(0) : row_of.numel() / top_k;
  if (in.weights.has_value()) {
    const host::TensorView& weights = in.weights.value();
    SMJ_CHECK_VALUE(weights.ndim() == 2 && weights.size(1) == top_k)
        << "expert_weights: expected [num_tokens, top_k=" << top_k << "], got "
        << host::shape_text(weights);
    host::check_contiguous("expert_weights", weights);
    host::check_device("expert_weights", weights, in.gemm2_out.device());
    num_tokens = weights.size(0);
  }
  SMJ_CHECK_VALUE(num_tokens <= std::numeric_limits<int32_t>::max() / top_k)
      << (in.weights.has_value() ? "expert_weights" : "expanded_idx_to_permuted_idx")
      << ": expected num_tokens * top_k below 2^31, got " << num_tokens << " * " << top_k;
  const bool flat = row_of.ndim() == 1 && row_of.size(0) == num_tokens * top_k;
  const bool matrix = row_of.ndim() == 2 && row_of.size(0) == num_tokens && row_of.size(1) == top_k;
  SMJ_CHECK_VALUE(flat || matrix) << "expanded_idx_to_permuted_idx: expected [num_tokens="
                                  << num_tokens << ", top_k=" << top_k << "] or its flat form, got "
                                  << host::shape_text(row_of);
  host::check_contiguous("expanded_idx_to_permuted_idx", row_of);
  host::check_device("expanded_idx_to_permuted_idx", row_of, in.gemm2_out.device());
  return num_tokens;
}

// A matrix of activations with a row a token, beside gemm2_out.
inline void check_token_rows(const char* name, const host::TensorView& x,
                             const host::TensorView& gemm2_out, int64_t num_tokens,
                             int64_t hidden_dim, const char* remedy) {
  host::check_rows(name, x);
  check_activation(name, x, gemm2_out.dtype());
  SMJ_CHECK_VALUE(x.size(0) == num_tokens && x.size(1) == hidden_dim)
      << name << ": expected [" << num_tokens << ", " << hidden_dim << "], got "
      << host::shape_text(x) << remedy;
  host::check_device(name, x, gemm2_out.device());
}

// Returns whether the logits are float32.
inline bool check_gate(const FinalizeInputs& in, int64_t num_tokens) {
  const host::TensorView& gate = in.gate_logits.value();
  SMJ_CHECK_VALUE(in.shared.has_value())
      << "shared_gate_logits: expected a shared_output to go with it, got None; pass both or none";
  const bool is_float = host::dtype_of(gate.dtype()) == host::DType::kFloat32;
  if (!is_float) check_activation("shared_gate_logits", gate, in.gemm2_out.dtype());
  SMJ_CHECK_VALUE(gate.numel() == num_tokens &&
                  (gate.ndim() == 1 || (gate.ndim() == 2 && gate.size(1) == 1)))
      << "shared_gate_logits: expected [num_tokens=" << num_tokens << "] or [" << num_tokens
      << ", 1], got " << host::shape_text(gate);
  host::check_contiguous("shared_gate_logits", gate);
  host::check_device("shared_gate_logits", gate, in.gemm2_out.device());
  return is_float;
}

inline const char* width_name(const FinalizeInputs& in) {
  return in.shared.has_value() ? "shared_output" : "hidden_dim";
}

// H, from whichever argument tells it.
inline int64_t output_width(const FinalizeInputs& in, const host::Optional<int64_t>& hidden_dim) {
  host::check_rows("gemm2_out", in.gemm2_out);
  if (!in.shared.has_value()) {
    const int64_t padded = in.gemm2_out.size(1);
    SMJ_CHECK_VALUE(!hidden_dim.has_value() ||
                    (hidden_dim.value() >= 1 && hidden_dim.value() <= padded))
        << "hidden_dim: expected 1 to " << padded << ", the width of gemm2_out, got "
        << hidden_dim.value();
    return hidden_dim.value_or(padded);
  }
  host::check_rows("shared_output", in.shared.value());
  const int64_t width = in.shared.value().size(1);
  SMJ_CHECK_VALUE(!hidden_dim.has_value() || hidden_dim.value() == width)
      << "hidden_dim: expected " << width << ", the width of shared_output, got "
      << hidden_dim.value();
  return width;
}

// Everything a kernel reads; params.out and out_stride are left to the caller. width_name is the
// argument that hidden_dim comes from.
inline FinalizeCall check_finalize_inputs(const FinalizeInputs& in, int64_t hidden_dim,
                                          const char* width_name, int64_t top_k,
                                          double routed_factor) {
  using host::DType;
  FinalizeCall call{};
  const host::TensorView& gemm2_out = in.gemm2_out;
  call.activation = check_float("gemm2_out", gemm2_out);
  call.weight = DType::kNone;
  if (in.weights.has_value()) call.weight = check_float("expert_weights", in.weights.value());
  host::check_rows("gemm2_out", gemm2_out);
  const int64_t num_tokens = check_routing(in, top_k);
  SMJ_CHECK_VALUE(host::row_stride(gemm2_out) * host::item_size(call.activation) <=
                  std::numeric_limits<uint32_t>::max())
      << "gemm2_out: expected rows less than 4 GB apart, got stride " << gemm2_out.stride(0)
      << "; call .contiguous()";
  SMJ_CHECK_VALUE(gemm2_out.size(0) <= std::numeric_limits<int32_t>::max())
      << "gemm2_out: expected fewer than 2^31 rows, got " << gemm2_out.size(0);
  SMJ_CHECK_VALUE(hidden_dim >= 1 && hidden_dim <= gemm2_out.size(1))
      << width_name << ": expected a width of 1 to " << gemm2_out.size(1)
      << " (the width of gemm2_out), got " << hidden_dim;
  SMJ_CHECK_VALUE(hidden_dim <= kMaxHiddenDim)
      << width_name << ": expected a width of at most " << kMaxHiddenDim << ", got " << hidden_dim;
  FinalizeParams& p = call.params;
  if (in.shared.has_value()) {
    const host::TensorView& s = in.shared.value();
    check_token_rows("shared_output", s, gemm2_out, num_tokens, hidden_dim,
                     "; pass None for no shared expert");
    p.shared = s.data_ptr();
    p.shared_stride = host::row_stride(s);
  }
  if (in.gate_logits.has_value()) {
    p.gate_is_float = check_gate(in, num_tokens);
    p.gate_logits = in.gate_logits.value().data_ptr();
  }
  p.gemm2_out = gemm2_out.data_ptr();
  p.row_of = static_cast<const int32_t*>(in.row_of.data_ptr());
  p.weights = in.weights.has_value() ? in.weights.value().data_ptr() : nullptr;
  p.weight_type = call.weight == DType::kBFloat16  ? WeightType::kBFloat16
                  : call.weight == DType::kFloat16 ? WeightType::kFloat16
                                                   : WeightType::kFloat32;
  p.gemm2_stride = host::row_stride(gemm2_out);
  p.num_tokens = num_tokens;
  p.num_rows = gemm2_out.size(0);
  p.hidden_dim = static_cast<int32_t>(hidden_dim);
  p.top_k = static_cast<int32_t>(top_k);
  p.routed_factor = static_cast<float>(routed_factor);
  return call;
}

// What is written may share no memory with what is read, but may_be where it is exactly that.
inline void check_apart(const char* name, const host::TensorView& written, const FinalizeInputs& in,
                        const char* may_be = nullptr,
                        const host::Optional<host::TensorView>& same = {}) {
  const host::RowBytes rows = host::row_bytes(written);
  const auto apart = [&](const char* other, const host::TensorView& read) {
    SMJ_CHECK_VALUE(!rows.overlaps(host::row_bytes(read)))
        << name << ": shares memory with " << other << "; pass another tensor";
  };
  apart("gemm2_out", in.gemm2_out);
  apart("expanded_idx_to_permuted_idx", in.row_of);
  if (in.weights.has_value()) apart("expert_weights", in.weights.value());
  if (in.gate_logits.has_value()) apart("shared_gate_logits", in.gate_logits.value());
  if (same.has_value()) {
    const host::TensorView& s = same.value();
    const bool is_it =
        s.data_ptr() == written.data_ptr() && host::row_stride(s) == host::row_stride(written);
    SMJ_CHECK_VALUE(is_it || !rows.overlaps(host::row_bytes(s)))
        << name << ": shares part of its memory with " << may_be << "; pass exactly " << may_be
        << ", or another tensor";
  }
}

inline void check_written_rows(const char* name, const host::TensorView& x, int64_t num_tokens) {
  SMJ_CHECK_VALUE(num_tokens <= 1 || x.stride(0) >= x.size(1))
      << name << ": expected rows that do not overlap, got row stride " << x.stride(0);
}

inline FinalizeCall check_finalize(const host::TensorView& out, const FinalizeInputs& in,
                                   int64_t top_k, double routed_factor) {
  host::check_rows("out", out);
  check_activation("out", out, in.gemm2_out.dtype());
  FinalizeCall call = check_finalize_inputs(in, out.size(1), width_name(in), top_k, routed_factor);
  FinalizeParams& p = call.params;
  check_token_rows("out", out, in.gemm2_out, p.num_tokens, p.hidden_dim, "");
  check_written_rows("out", out, p.num_tokens);
  check_apart("out", out, in, "shared_output", in.shared);
  p.out = out.data_ptr();
  p.out_stride = host::row_stride(out);
  return call;
}

}  // namespace moe
}  // namespace sgl_moe_jit
