// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_params.h: a finalize with residual add and RMSNorm as plain pointers and
// numbers, for CUDA and CPU alike.
//
//   y[t, h] = the finalize of token t before its rounding (finalize_params.h)
//   s[t, h] = y[t, h] + residual[t, h]
//   n[t, h] = s[t, h] / sqrt(sum_h s[t, h]^2 / H + eps) * norm_weight[h]
//
// residual_out is s rounded. out is n rounded; or, quantised, n / scale[t] as float8_e4m3fn.
//
// Arithmetic, the same on every path and on the CPU, so that a row alone equals the row in a batch:
// float32, every operation rounded to nearest even, no contraction but the fma written here.
//   leaf l   q = +0; for columns 4 l to 4 l + 3, ascending: q = fma(s, s, q). Columns >= H count 0.
//   block    2048 leaves, 8192 columns; leaves beyond the row are +0. Added as a balanced binary
//            tree over neighbours: (l0 + l1) + (l2 + l3), ...
//   total    +0, then every block's tree, ascending
// What follows from total is in finalize_norm_math.h.
#pragma once

#include "sgl_moe_jit/moe/finalize_params.h"

namespace sgl_moe_jit {
namespace moe {

constexpr int kNormLeaf = 4;      // columns
constexpr int kNormBlock = 8192;  // columns
// Three blocks: a row stays in float32 on chip between its sum and its output, and the smallest
// shared memory among the supported GPUs is 99 KB a block.
constexpr int64_t kMaxNormHidden = 24576;

struct FinalizeNormParams {
  FinalizeParams sum;           // sum.out: [T, H] normalised; float8_e4m3fn when scale is there
  void* residual_out;           // [T, H] like the activations; may be residual
  float* scale;                 // [T], or nullptr: no quantisation
  const void* residual;         // [T, H] like the activations
  const void* norm_weight;      // [H] like the activations
  int64_t residual_out_stride;  // strides in elements between rows
  int64_t residual_stride;
  float eps;
};

}  // namespace moe
}  // namespace sgl_moe_jit
