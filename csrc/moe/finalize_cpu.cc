// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu.cc: out[t] = shared[t] + factor * sum_k w[t, k] * gemm2_out[row(t, k)] on a CPU.
//
// Cost per token as in moe/finalize.cuh; memory bandwidth is the wall. One body is compiled for
// several instruction sets and chosen at run time, so a module built on one host runs on every
// other. All of them give the CUDA kernel's bits: fused multiply-add in ascending k (in software
// where there is no FMA unit), products and sums rounded separately after it (-ffp-contract=off),
// subnormals kept.
#include "finalize_cpu.h"

#include <algorithm>
#include <cstring>

#include "sgl_moe_jit/host/parallel_for.h"

#if defined(__x86_64__)
#define SMJ_X86 1
#define SMJ_AVX2 __attribute__((target("avx2,fma")))
#define SMJ_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,fma,prefer-vector-width=512")))
#endif
#define SMJ_INLINE inline __attribute__((always_inline))

namespace sgl_moe_jit {
namespace moe {
namespace {

// Columns a thread sums before it moves on: 4 KB of accumulators stay in L1 beside one stretch of
// each row.
constexpr int kTile = 1024;

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

template <typename Act, typename Weight>
SMJ_INLINE void finalize_token(const FinalizeParams& p, int64_t token) {
  const int32_t* row_of = p.row_of + token * p.top_k;
  const Weight* weights = static_cast<const Weight*>(p.weights) + token * p.top_k;
  const Act* rows[kMaxTopK];
  float row_weights[kMaxTopK];
  int num_rows = 0;
  for (int k = 0; k < p.top_k; ++k) {
    if (row_of[k] < 0) continue;
    rows[num_rows] = static_cast<const Act*>(p.gemm2_out) + row_of[k] * p.gemm2_stride;
    row_weights[num_rows++] = to_float(weights[k]);
  }
  Act* out = static_cast<Act*>(p.out) + token * p.out_stride;
  const Act* shared = static_cast<const Act*>(p.shared);
  if (shared != nullptr) shared += token * p.shared_stride;
  if (num_rows == 0) {  // exactly the shared row, -0 and NaN included; or +0
    if (shared == nullptr) {
      std::memset(out, 0, sizeof(Act) * p.hidden_dim);
    } else if (shared != out) {
      std::memcpy(out, shared, sizeof(Act) * p.hidden_dim);
    }
    return;
  }
  float acc[kTile];
  for (int begin = 0; begin < p.hidden_dim; begin += kTile) {
    const int count = std::min(kTile, p.hidden_dim - begin);
    std::fill_n(acc, count, 0.0f);
    for (int k = 0; k < num_rows; ++k) {
      const Act* row = rows[k] + begin;
      const float w = row_weights[k];
      for (int i = 0; i < count; ++i) acc[i] = __builtin_fmaf(w, to_float(row[i]), acc[i]);
    }
    if (p.routed_factor != 1.0f) {
      for (int i = 0; i < count; ++i) acc[i] *= p.routed_factor;
    }
    if (shared != nullptr) {
      for (int i = 0; i < count; ++i) acc[i] += to_float(shared[begin + i]);
    }
    for (int i = 0; i < count; ++i) store(out + begin + i, acc[i]);
  }
}

template <typename Act, typename Weight>
void finalize_portable(const FinalizeParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) finalize_token<Act, Weight>(p, t);
}

#ifdef SMJ_X86
template <typename Act, typename Weight>
SMJ_AVX2 void finalize_avx2(const FinalizeParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) finalize_token<Act, Weight>(p, t);
}

template <typename Act, typename Weight>
SMJ_AVX512 void finalize_avx512(const FinalizeParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) finalize_token<Act, Weight>(p, t);
}
#endif

template <typename Act, typename Weight>
void run(const FinalizeParams& p, CpuIsa isa, int num_threads) {
  auto kernel = finalize_portable<Act, Weight>;
#ifdef SMJ_X86
  if (isa == CpuIsa::kAvx2) kernel = finalize_avx2<Act, Weight>;
  if (isa == CpuIsa::kAvx512) kernel = finalize_avx512<Act, Weight>;
#endif
  const int64_t bytes_per_token =
      static_cast<int64_t>(sizeof(Act)) * p.hidden_dim * (p.top_k + 1 + (p.shared != nullptr));
  host::parallel_for(p.num_tokens, bytes_per_token, num_threads,
                     [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

}  // namespace

CpuIsa best_cpu_isa() {
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

void finalize_cpu(const FinalizeParams& p, bool activation_is_bf16, bool weight_is_bf16, CpuIsa isa,
                  int num_threads) {
  if (activation_is_bf16) {
    weight_is_bf16 ? run<uint16_t, uint16_t>(p, isa, num_threads)
                   : run<uint16_t, float>(p, isa, num_threads);
  } else {
    weight_is_bf16 ? run<float, uint16_t>(p, isa, num_threads)
                   : run<float, float>(p, isa, num_threads);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
