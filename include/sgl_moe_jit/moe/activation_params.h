// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation_params.h: one silu_and_mul call as plain pointers and numbers, for CUDA and CPU.
//
//   out[n, i] = x[n, i] / (1 + exp(-x[n, i])) * x[n, I + i]
//
// N rows, I = width.
#pragma once

#include <cstdint>

namespace sgl_moe_jit {
namespace moe {

struct ActivationParams {
  void* out;         // [N, I] contiguous
  const void* x;     // [N, 2I]: gate, then up
  int64_t x_stride;  // between rows, in elements
  int64_t num_rows;  // N, below 2^31
  int64_t width;     // I
};

}  // namespace moe
}  // namespace sgl_moe_jit
