// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/cpu_kernel.h: instruction sets chosen at run time, and narrow floats on a CPU.
//
// A kernel's body is one always-inlined template; run_for_isa compiles it once for each set, so
// that a module built on one host runs on every other of its machine type. No TVM-FFI here.
#pragma once

#include <cstdint>
#include <cstring>

#define SMJ_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <cpuid.h>
#define SMJ_X86 1
#define SMJ_AVX2 __attribute__((target("avx2,fma,f16c")))
#define SMJ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,prefer-vector-width=512")))
#endif

namespace sgl_moe_jit {
namespace host {

// As numbered by SGL_MOE_JIT_CPU_ISA's choices.
enum class CpuIsa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

#ifdef SMJ_X86
// By its cpuid bit: not every compiler takes the name in __builtin_cpu_supports. Asked once: in a
// virtual machine the instruction traps, which made a call of 1 us take 9.
inline bool has_f16c() {
  static const bool found = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29)) != 0;
  }();
  return found;
}
#endif

// The best instruction set this machine has.
inline CpuIsa best_cpu_isa() {
#ifdef SMJ_X86
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("fma") && has_f16c();
  if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl")) {
    return CpuIsa::kAvx512;
  }
  if (fma && __builtin_cpu_supports("avx2")) return CpuIsa::kAvx2;
#endif
  return CpuIsa::kPortable;
}

// Resolves a caller's choice: -1 takes the best. False: this machine lacks what was asked for.
inline bool resolve_cpu_isa(int64_t asked, CpuIsa* isa) {
  const CpuIsa best = best_cpu_isa();
  *isa = asked < 0 ? best : static_cast<CpuIsa>(asked);
  return asked <= static_cast<int64_t>(best);
}

// Runs Body::run(args...) compiled for an instruction set. Body::run must be SMJ_INLINE.
template <typename Body, typename... Args>
void run_portable(Args... args) {
  Body::run(args...);
}
#ifdef SMJ_X86
template <typename Body, typename... Args>
SMJ_AVX2 void run_avx2(Args... args) {
  Body::run(args...);
}
template <typename Body, typename... Args>
SMJ_AVX512 void run_avx512(Args... args) {
  Body::run(args...);
}
#endif
template <typename Body, typename... Args>
void run_for_isa(CpuIsa isa, Args... args) {
#ifdef SMJ_X86
  if (isa == CpuIsa::kAvx512) return run_avx512<Body>(args...);
  if (isa == CpuIsa::kAvx2) return run_avx2<Body>(args...);
#endif
  run_portable<Body>(args...);
}

// Floats narrower than float32, by their bits, each a type of its own.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
// float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities. Written only.
struct Float8E4M3 {
  uint8_t bits;
};

SMJ_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SMJ_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <typename T>
float to_float(T) = delete;  // no integer is taken for an activation
SMJ_INLINE float to_float(float x) { return x; }
SMJ_INLINE float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
// Without F16C, so that one source serves every instruction set: the exponent and mantissa fields
// read as a float are the value times 2^-112, exactly, subnormals included. Infinity and NaN keep
// their mantissa and get an exponent of ones.
SMJ_INLINE float to_float(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t not_finite = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return float_of(scaled | not_finite | sign);
}

// Each rounds to nearest even, keeps subnormals, and makes a NaN quiet.
SMJ_INLINE void store(float* p, float x) { *p = x; }
// Not AVX512's vcvtneps2bf16, which flushes subnormals.
SMJ_INLINE void store(BFloat16* p, float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  // All of it in 32 bits: where gcc may choose in 16, it packs and unpacks every step.
  p->bits = static_cast<uint16_t>((is_nan ? bits | 0x400000u : rounded) >> 16);
}

// x where it is negative as an int32_t, else 0.
SMJ_INLINE uint32_t negative_part(uint32_t x) { return x & (0u - (x >> 31)); }

// Two roundings, each of the value clamped to where it holds; at the smallest normal they are
// equal. Below it, adding 2^23 times the unit there leaves the value in units in the low bits,
// rounded by the adder. From it on, the exponent is moved and the bits beyond the mantissa are
// rounded away. No choice between them by a condition: gcc would move the float addition behind
// it, and then vectorise nothing.
SMJ_INLINE void store(Float16* p, float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kNormal = 113u << 23, kBorder = 0x400u;  // 2^-14
  const uint32_t below = negative_part(magnitude - kNormal);
  const uint32_t small = kNormal + below, large = magnitude - below;
  const uint32_t subnormal = bits_of(float_of(small) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (large - (112u << 23) + 0xfffu + ((large >> 13) & 1u)) >> 13;
  const uint32_t finite = subnormal + normal - kBorder;
  const uint32_t half = finite < 0x7c00u ? finite : 0x7c00u;
  const uint32_t is_nan = magnitude > 0x7f800000u;
  const uint32_t quiet = (0x200u | ((magnitude >> 13) & 0x1ffu)) & (0u - is_nan);
  p->bits = static_cast<uint16_t>(half | quiet | sign);
}
// The same; saturates at +-448, and NaN is 0x7f, as on CUDA.
SMJ_INLINE void store(Float8E4M3* p, float x) {
  const uint32_t bits = bits_of(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kNormal = 121u << 23, kBorder = 0x08u;  // 2^-6
  const uint32_t below = negative_part(magnitude - kNormal);
  const uint32_t small = kNormal + below, large = magnitude - below;
  const uint32_t subnormal = bits_of(float_of(small) + 16384.0f) - bits_of(16384.0f);
  const uint32_t normal = (large - (120u << 23) + 0x7ffffu + ((large >> 20) & 1u)) >> 20;
  const uint32_t is_nan = magnitude > 0x7f800000u;
  const uint32_t any = subnormal + normal - kBorder;
  const uint32_t code = any < 0x7eu ? any : 0x7eu;
  p->bits = static_cast<uint8_t>((code + is_nan) | (sign & (is_nan - 1u)));
}

}  // namespace host
}  // namespace sgl_moe_jit
