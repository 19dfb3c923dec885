// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation_math.h: sigmoid and silu(gate) * up in float32, operation by operation, for CUDA
// and CPU alike.
//
// Every step is one correctly rounded operation spelled out here (no library exponential, no
// contraction), so that CUDA, every CPU instruction set, the vector and the scalar path agree bit
// for bit.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SMJ_MATH __device__ __forceinline__
#else
#define SMJ_MATH inline __attribute__((always_inline))
#endif

namespace sgl_moe_jit {
namespace moe {
namespace math {

#ifdef __CUDACC__
SMJ_MATH float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
SMJ_MATH float mul(float a, float b) { return __fmul_rn(a, b); }
SMJ_MATH float add(float a, float b) { return __fadd_rn(a, b); }
SMJ_MATH float div(float a, float b) { return __fdiv_rn(a, b); }
// 1 / x, correctly rounded, for x from 1 to 2. The instruction's last bit may be off and one step
// of Newton's mends it for each of these floats, which a test goes through; a division's other
// checks and its branch are for what cannot happen here, and cost as much as all the rest.
SMJ_MATH float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}
SMJ_MATH float abs(float x) { return fabsf(x); }
SMJ_MATH int32_t bits_of(float x) { return __float_as_int(x); }
SMJ_MATH float float_of(int32_t bits) { return __int_as_float(bits); }
#else  // built with -ffp-contract=off
SMJ_MATH float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SMJ_MATH float mul(float a, float b) { return a * b; }
SMJ_MATH float add(float a, float b) { return a + b; }
SMJ_MATH float div(float a, float b) { return a / b; }
SMJ_MATH float reciprocal(float x) { return 1.0f / x; }
SMJ_MATH float abs(float x) { return __builtin_fabsf(x); }
SMJ_MATH int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SMJ_MATH float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
#endif

// exp(x) for x <= 0, to 2 units in the last place; branch-free, so that compilers vectorise it.
SMJ_MATH float exp_of_negative(float x) {
  x = x > -104.0f ? x : -104.0f;  // exp(-104) rounds to zero; also takes NaN and -infinity in range
  // Adding 1.5 * 2^23 rounds to an integer and leaves that integer in the low bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = fma(x, 1.44269504f, kRound);
  const float n = add(shifted, -kRound);
  const int32_t exponent = bits_of(shifted) - bits_of(kRound);
  // ln 2 in two parts, the first with enough zero bits that n times it is exact.
  float r = fma(n, -0.693145751953125f, x);
  r = fma(n, -1.428606765330187e-06f, r);
  // exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2) / 2: weighted least-squares fit, error 5e-11.
  float p = 0.00019790290389209986f;
  p = fma(p, r, 0.0013944703387096524f);
  p = fma(p, r, 0.008333497680723667f);
  p = fma(p, r, 0.04166629537940025f);
  p = fma(p, r, 0.1666666567325592f);
  p = fma(p, r, 0.5f);
  const float exp_r = add(1.0f, fma(p, mul(r, r), r));
  // Two factors: 2^n alone has no normal float below n = -126.
  const int32_t half = exponent >> 1;
  const float first = float_of((half + 127) << 23);
  const float second = float_of((exponent - half + 127) << 23);
  return mul(mul(exp_r, first), second);
}

// 1 / (1 + exp(-x)), arranged so that the exponential never overflows. Rounded to float32 after
// each operation; NaN stays NaN, and the infinities give exactly 1 and 0.
SMJ_MATH float sigmoid(float x) {
  const float e = exp_of_negative(-abs(x));
  // The exponential takes NaN in range, so that it must come back in here.
  const float numerator = x < 0.0f ? e : (x >= 0.0f ? 1.0f : x);
  return mul(numerator, reciprocal(add(1.0f, e)));
}

// gate / (1 + exp(-gate)) * up, arranged so that the exponential never overflows. Rounded to
// float32 after each operation; -infinity gives NaN, as it does in torch.
SMJ_MATH float silu_and_mul(float gate, float up) {
  const float e = exp_of_negative(-abs(gate));
  // A choice between factors, not between products: compilers do not vectorise a conditional
  // multiplication, because it could trap.
  const float numerator = mul(gate, gate < 0.0f ? e : 1.0f);
  return mul(mul(numerator, reciprocal(add(1.0f, e))), up);
}

}  // namespace math
}  // namespace moe
}  // namespace sgl_moe_jit
