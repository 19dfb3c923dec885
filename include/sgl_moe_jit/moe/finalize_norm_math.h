// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_math.h: what follows from a row's sum of squares and its largest value, for
// CUDA and CPU alike. One correctly rounded float32 operation after another (activation_math.h).
#pragma once

#include <cmath>

#include "sgl_moe_jit/moe/activation_math.h"

namespace sgl_moe_jit {
namespace moe {
namespace math {

#ifdef __CUDACC__
SMJ_MATH float sqrt(float x) { return __fsqrt_rn(x); }
#else
SMJ_MATH float sqrt(float x) { return __builtin_sqrtf(x); }
#endif

// 1 / sqrt(total / hidden_dim + eps): a row's factor.
SMJ_MATH float inverse_rms(float total, int32_t hidden_dim, float eps) {
  return div(1.0f, sqrt(add(div(total, static_cast<float>(hidden_dim)), eps)));
}

// n = (s * inv) * norm_weight.
SMJ_MATH float normalised(float s, float inv, float norm_weight) {
  return mul(mul(s, inv), norm_weight);
}

// What amax, the largest |n| of a row, is divided by: amax becomes 448, the largest finite
// float8_e4m3fn. A row of zeros has 1. Not below 2^-126, so that its reciprocal is finite.
// NaN takes no part in amax. Infinity makes the scale infinite and so the reciprocal 0: the finite
// values of that row become zeros, the infinite ones NaN, and all of them NaN when scaled back.
SMJ_MATH float fp8_scale(float amax) {
  const float scale = div(amax, 448.0f);
  const float smallest = 1.17549435e-38f;  // 2^-126
  return amax > 0.0f ? (scale > smallest ? scale : smallest) : 1.0f;
}

// n times this becomes float8_e4m3fn: rounded to nearest even, saturating at +-448, NaN as 0x7f.
SMJ_MATH float fp8_inverse_scale(float scale) { return div(1.0f, scale); }

}  // namespace math
}  // namespace moe
}  // namespace sgl_moe_jit
