// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_params.h: one finalize call as plain pointers and numbers, for CUDA and CPU alike.
//
//   out[t, h] = gate[t] * shared[t, h] + factor * sum_k weights[t, k] * gemm2_out[row_of[t, k], h]
//   gate[t]   = sigmoid(gate_logits[t]), or 1
//
// T tokens, K = top_k, P permuted rows, H = hidden_dim, H_pad >= H columns in gemm2_out.
#pragma once

#include <cstdint>

namespace sgl_moe_jit {
namespace moe {

constexpr int kMaxTopK = 64;
constexpr int64_t kMaxHiddenDim =
    1 << 23;  // 32768 blocks a token on the scalar path; a grid has 65535

enum class WeightType : uint8_t { kFloat32, kBFloat16, kFloat16 };

struct FinalizeParams {
  void* out;                // [T, H]
  const void* gemm2_out;    // [P, H_pad], rows grouped by expert
  const int32_t* row_of;    // [T, K], row of gemm2_out; negative = no row here, touches no memory
  const void* weights;      // [T, K], or nullptr: all 1
  const void* shared;       // [T, H], or nullptr
  const void* gate_logits;  // [T] float32 or like the activations, or nullptr; needs shared
  int64_t out_stride;       // strides in elements between rows
  int64_t gemm2_stride;     // below 2^32 bytes
  int64_t shared_stride;
  int64_t num_tokens;
  int64_t num_rows;        // P
  int32_t hidden_dim;      // H
  int32_t top_k;           // K, 1 to kMaxTopK
  float routed_factor;     // multiplies the routed sum, never the shared row
  bool gate_is_float;      // of gate_logits, where activations are not float32
  WeightType weight_type;  // of weights, for kernels that are not built for one
};

}  // namespace moe
}  // namespace sgl_moe_jit
