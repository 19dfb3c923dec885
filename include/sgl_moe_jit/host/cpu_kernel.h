// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/cpu_kernel.h: instruction sets chosen at run time, and bfloat16 on a CPU.
//
// A kernel's body is one always-inlined template; run_for_isa compiles it once for each set, so
// that a module built on one host runs on every other of its machine type. No TVM-FFI here.
#pragma once

#include <cstdint>
#include <cstring>

#define SMJ_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define SMJ_X86 1
#define SMJ_AVX2 __attribute__((target("avx2,fma")))
#define SMJ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,prefer-vector-width=512")))
#endif

namespace sgl_moe_jit {
namespace host {

// As numbered by SGL_MOE_JIT_CPU_ISA's choices.
enum class CpuIsa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best instruction set this machine has.
inline CpuIsa best_cpu_isa() {
#ifdef SMJ_X86
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("fma");
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

SMJ_INLINE float to_float(float x) { return x; }
SMJ_INLINE float to_float(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

SMJ_INLINE void store(float* p, float x) { *p = x; }
// Round to nearest even. Not AVX512's vcvtneps2bf16, which flushes subnormals.
SMJ_INLINE void store(uint16_t* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  *p = static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}

}  // namespace host
}  // namespace sgl_moe_jit
