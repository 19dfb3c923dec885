// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/cpu_vectors.h: the conversions of cpu_kernel.h on registers and on whole arrays, bit for
// bit.
//
// For loops that compilers do not turn into good vector code by themselves. What takes registers is
// for x86 and for callers with the same target attribute.
//
// A store may stream: past the caches, without reading the line first. Then the address is a
// multiple of 64 bytes, the register's part of a line aside, and _mm_sfence ends the work.
#pragma once

#include "sgl_moe_jit/host/cpu_kernel.h"

#ifdef SMJ_X86
#include <immintrin.h>
#endif

namespace sgl_moe_jit {
namespace host {

template <typename T>
void widen_portable(const T* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(x[i]);
}
template <typename T>
void narrow_portable(const float* x, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) store(out + i, x[i]);
}

#ifdef SMJ_X86

SMJ_AVX2 inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
SMJ_AVX2 inline __m256 load8(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
SMJ_AVX2 inline __m256 load8(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

SMJ_AVX2 inline void put(void* p, __m128i x, bool stream) {
  __m128i* to = static_cast<__m128i*>(p);
  stream ? _mm_stream_si128(to, x) : _mm_storeu_si128(to, x);
}
SMJ_AVX2 inline void store8(float* p, __m256 x, bool stream) {
  stream ? _mm256_stream_ps(p, x) : _mm256_storeu_ps(p, x);
}
SMJ_AVX2 inline void store8(BFloat16* p, __m256 x, bool stream) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  put(p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)), stream);
}
SMJ_AVX2 inline void store8(Float16* p, __m256 x, bool stream) {
  put(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT), stream);
}

// Masked, with every bit set: gcc 12 warns of an uninitialised value inside the plain intrinsics.
constexpr __mmask16 kAll16 = 0xffff;

SMJ_AVX512 inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
SMJ_AVX512 inline __m512 load16(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll16, bits);
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll16, wide, 16));
}
SMJ_AVX512 inline __m512 load16(const Float16* p) {
  return _mm512_maskz_cvtph_ps(kAll16, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

SMJ_AVX512 inline void put(void* p, __m256i x, bool stream) {
  __m256i* to = static_cast<__m256i*>(p);
  stream ? _mm256_stream_si256(to, x) : _mm256_storeu_si256(to, x);
}
SMJ_AVX512 inline void store16(float* p, __m512 x, bool stream) {
  stream ? _mm512_stream_ps(p, x) : _mm512_storeu_ps(p, x);
}
SMJ_AVX512 inline void store16(BFloat16* p, __m512 x, bool stream) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd =
      _mm512_and_si512(_mm512_maskz_srli_epi32(kAll16, bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet_or_rounded =
      _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  const __m512i high = _mm512_maskz_srli_epi32(kAll16, quiet_or_rounded, 16);
  put(p, _mm512_maskz_cvtepi32_epi16(kAll16, high), stream);
}
SMJ_AVX512 inline void store16(Float16* p, __m512 x, bool stream) {
  put(p, _mm512_maskz_cvtps_ph(kAll16, x, _MM_FROUND_TO_NEAREST_INT), stream);
}

template <typename T>
SMJ_AVX2 void widen_avx2(const T* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, load8(x + i));
  for (; i < count; ++i) out[i] = to_float(x[i]);
}
template <typename T>
SMJ_AVX2 void narrow_avx2(const float* x, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store8(out + i, _mm256_loadu_ps(x + i), false);
  for (; i < count; ++i) store(out + i, x[i]);
}
template <typename T>
SMJ_AVX512 void widen_avx512(const T* x, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm512_storeu_ps(out + i, load16(x + i));
  for (; i < count; ++i) out[i] = to_float(x[i]);
}
template <typename T>
SMJ_AVX512 void narrow_avx512(const float* x, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store16(out + i, _mm512_loadu_ps(x + i), false);
  for (; i < count; ++i) store(out + i, x[i]);
}
#endif  // SMJ_X86

template <typename T>
struct Conversions {
  void (*widen)(const T* x, int64_t count, float* out);
  void (*narrow)(const float* x, int64_t count, T* out);
};

template <typename T>
Conversions<T> conversions_for(CpuIsa isa) {
#ifdef SMJ_X86
  if (isa == CpuIsa::kAvx512) return {widen_avx512<T>, narrow_avx512<T>};
  if (isa == CpuIsa::kAvx2) return {widen_avx2<T>, narrow_avx2<T>};
#endif
  return {widen_portable<T>, narrow_portable<T>};
}

}  // namespace host
}  // namespace sgl_moe_jit
