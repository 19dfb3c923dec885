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

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/host/parallel_for.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using host::store;
using host::to_float;

// Columns summed at a time: 8 AVX2 or 4 AVX512 registers of accumulators.
constexpr int kTile = 64;

// Asks for the same columns two tiles on. The hardware prefetchers lose the thread among eight
// rows: 64 tokens of hidden 7168 from memory took 510 us without and 380 us with it (2-core EPYC
// virtual machine, 2026-11-29). A prefetch past a row's end touches nothing.
template <typename Act>
SMJ_INLINE void prefetch(const Act* row, int count) {
  const auto ahead = reinterpret_cast<uintptr_t>(row) + 2 * kTile * sizeof(Act);
  for (uintptr_t line = 0; line < count * sizeof(Act); line += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + line));
  }
}

// Sums columns [begin, begin + count) of one token. kCount is count when known at compile time: the
// accumulators then live in registers from the first row to the last.
template <int kCount, typename Act>
SMJ_INLINE void finalize_columns(const FinalizeParams& p, const Act* const* rows,
                                 const float* row_weights, int num_rows, const Act* shared,
                                 Act* out, int begin, int count) {
  if (kCount > 0) count = kCount;
  float acc[kTile];
  for (int i = 0; i < count; ++i) acc[i] = 0.0f;
  for (int k = 0; k < num_rows; ++k) {
    // Keeps gcc from jamming two rows into one scalar loop: 15 us a token instead of 2 (gcc 12,
    // EPYC with AVX512, 2026-11-29).
    asm volatile("");
    const Act* row = rows[k] + begin;
    prefetch(row, count);
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
  int begin = 0;
  for (; begin + kTile <= p.hidden_dim; begin += kTile) {
    finalize_columns<kTile>(p, rows, row_weights, num_rows, shared, out, begin, kTile);
  }
  if (begin < p.hidden_dim) {
    finalize_columns<0>(p, rows, row_weights, num_rows, shared, out, begin, p.hidden_dim - begin);
  }
}

template <typename Act, typename Weight>
struct Tokens {
  static SMJ_INLINE void run(const FinalizeParams* p, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) finalize_token<Act, Weight>(*p, t);
  }
};

template <typename Act, typename Weight>
void run(const FinalizeParams& p, host::CpuIsa isa, const host::Workers& workers) {
  const int64_t bytes_per_token =
      static_cast<int64_t>(sizeof(Act)) * p.hidden_dim * (p.top_k + 1 + (p.shared != nullptr));
  host::parallel_for(p.num_tokens, bytes_per_token, workers, [&](int64_t begin, int64_t end) {
    host::run_for_isa<Tokens<Act, Weight>>(isa, &p, begin, end);
  });
}

}  // namespace

void finalize_cpu(const FinalizeParams& p, bool activation_is_bf16, bool weight_is_bf16,
                  host::CpuIsa isa, const host::Workers& workers) {
  if (activation_is_bf16) {
    weight_is_bf16 ? run<uint16_t, uint16_t>(p, isa, workers)
                   : run<uint16_t, float>(p, isa, workers);
  } else {
    weight_is_bf16 ? run<float, uint16_t>(p, isa, workers) : run<float, float>(p, isa, workers);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
