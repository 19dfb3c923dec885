// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_sum_cpu.h: finalized columns of one token on a CPU, before they are rounded; what
// every CPU kernel that finishes rows is built from. No TVM-FFI here.
//
// The arithmetic of moe/finalize_sum.cuh, bit for bit, on every instruction set: fused multiply-add
// in ascending k (in software where there is no FMA unit), products and sums rounded separately
// after it (-ffp-contract=off), subnormals kept.
#pragma once

#include <algorithm>
#include <cstring>

#include "finalize_rows_cpu.h"
#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/host/cpu_vectors.h"

namespace sgl_moe_jit {
namespace moe {

// Columns summed at a time: 8 AVX2 or 4 AVX512 registers of accumulators.
constexpr int kTile = 64;

// What is summed: a token's columns up to `end`, after which come those of `next` from the first
// on.
template <typename Act>
struct Stretch {
  const TokenRows<Act>& token;
  const TokenRows<Act>& next;
  float routed_factor;
  int end;
  bool stream;  // whether out is written past the caches; it is a multiple of 64 bytes then
};

// Asks the second-level cache for what lies from p on, if anything does: a prefetch raises no
// fault. Into the first-level cache, rows from memory took 1.3 to 1.5 times as long.
SMJ_INLINE void prefetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// How far ahead of a sum its rows are asked for; docs/kernel_notes.md has what was tried.
constexpr int kAheadBytes = 2048;

// Asks for the tile that follows the one at `column` at that distance, beyond the token's end among
// the next one's rows: the hardware prefetchers lose the thread among eight rows.
template <typename Act>
class Ahead {
 public:
  SMJ_INLINE Ahead(const Stretch<Act>& stretch, int column)
      : token_(&stretch.token),
        column_(column + std::min<int>(kAheadBytes / sizeof(Act), stretch.end)) {
    if (column_ < stretch.end) return;
    token_ = &stretch.next;
    column_ -= stretch.end;
  }

  // Row by row, each before the sum reads its own: 256 tokens of hidden 7168 from memory took 930
  // us, with all rows asked for together 980 us (2-core EPYC virtual machine, 2026-11-29).
  SMJ_INLINE void prefetch_row(int k) const {
    if (k < token_->num_rows) prefetch_tile(token_->rows[k]);
  }
  // What there is beside the rows below k.
  SMJ_INLINE void prefetch_rest(int k) const {
    for (; k < token_->num_rows; ++k) prefetch_tile(token_->rows[k]);
    if (token_->shared != nullptr) prefetch_tile(token_->shared);
  }

 private:
  SMJ_INLINE void prefetch_tile(const Act* row) const {
    prefetch(row + column_, kTile * sizeof(Act));
  }

  const TokenRows<Act>* token_;
  int column_;
};

// Sums `count` columns from `column` on, a multiple of kTile, into out: rounded to activations, or
// as float32.
template <typename Act, typename Out>
using SumTiles = void (*)(const Stretch<Act>& stretch, int column, int count, Out* out);

// acc += weight * row.
template <typename Act>
inline void add_scaled_tile(float weight, const Act* row, float* acc) {
  for (int i = 0; i < kTile; ++i) acc[i] = __builtin_fmaf(weight, host::to_float(row[i]), acc[i]);
}

template <typename Act, typename Out>
void sum_tiles_portable(const Stretch<Act>& stretch, int column, int count, Out* out) {
  const TokenRows<Act>& token = stretch.token;
  for (const int stop = column + count; column < stop; column += kTile, out += kTile) {
    float acc[kTile] = {};
    for (int k = 0; k < token.num_rows; ++k) {
      // Keeps gcc from jamming two rows into one scalar loop: 15 us a token instead of 2 where the
      // loop over columns is vectorised (gcc 12, EPYC with AVX512, 2026-11-29).
      asm volatile("");
      add_scaled_tile(token.weights[k], token.rows[k] + column, acc);
    }
    if (stretch.routed_factor != 1.0f) {
      for (int i = 0; i < kTile; ++i) acc[i] *= stretch.routed_factor;
    }
    if (token.shared != nullptr) add_scaled_tile(token.gate, token.shared + column, acc);
    for (int i = 0; i < kTile; ++i) host::store(out + i, acc[i]);
  }
}

#ifdef SMJ_X86
// The two differ in the width of their registers alone; a function's target cannot be a template
// parameter. Left to itself gcc 12 takes 1.5 times as long on rows in cache, and for float16 three
// times (docs/kernel_notes.md).
template <typename Act, typename Out>
SMJ_AVX2 void sum_tiles_avx2(const Stretch<Act>& stretch, int column, int count, Out* out) {
  const TokenRows<Act>& token = stretch.token;
  for (const int stop = column + count; column < stop; column += kTile, out += kTile) {
    const Ahead<Act> ahead(stretch, column);
    __m256 acc[8] = {};
    for (int k = 0; k < token.num_rows; ++k) {
      ahead.prefetch_row(k);
      const Act* row = token.rows[k] + column;
      const __m256 w = _mm256_set1_ps(token.weights[k]);
      for (int i = 0; i < 8; ++i) acc[i] = _mm256_fmadd_ps(w, host::load8(row + 8 * i), acc[i]);
    }
    ahead.prefetch_rest(token.num_rows);
    if (stretch.routed_factor != 1.0f) {
      const __m256 factor = _mm256_set1_ps(stretch.routed_factor);
      for (int i = 0; i < 8; ++i) acc[i] = _mm256_mul_ps(acc[i], factor);
    }
    if (token.shared != nullptr) {
      const Act* row = token.shared + column;
      const __m256 gate = _mm256_set1_ps(token.gate);
      for (int i = 0; i < 8; ++i) acc[i] = _mm256_fmadd_ps(gate, host::load8(row + 8 * i), acc[i]);
    }
    for (int i = 0; i < 8; ++i) host::store8(out + 8 * i, acc[i], stretch.stream);
  }
}

template <typename Act, typename Out>
SMJ_AVX512 void sum_tiles_avx512(const Stretch<Act>& stretch, int column, int count, Out* out) {
  const TokenRows<Act>& token = stretch.token;
  for (const int stop = column + count; column < stop; column += kTile, out += kTile) {
    const Ahead<Act> ahead(stretch, column);
    __m512 acc[4] = {};
    for (int k = 0; k < token.num_rows; ++k) {
      ahead.prefetch_row(k);
      const Act* row = token.rows[k] + column;
      const __m512 w = _mm512_set1_ps(token.weights[k]);
      for (int i = 0; i < 4; ++i) acc[i] = _mm512_fmadd_ps(w, host::load16(row + 16 * i), acc[i]);
    }
    ahead.prefetch_rest(token.num_rows);
    if (stretch.routed_factor != 1.0f) {
      const __m512 factor = _mm512_set1_ps(stretch.routed_factor);
      for (int i = 0; i < 4; ++i) acc[i] = _mm512_mul_ps(acc[i], factor);
    }
    if (token.shared != nullptr) {
      const Act* row = token.shared + column;
      const __m512 gate = _mm512_set1_ps(token.gate);
      for (int i = 0; i < 4; ++i) {
        acc[i] = _mm512_fmadd_ps(gate, host::load16(row + 16 * i), acc[i]);
      }
    }
    for (int i = 0; i < 4; ++i) host::store16(out + 16 * i, acc[i], stretch.stream);
  }
}
#endif

template <typename Act, typename Out>
SumTiles<Act, Out> sum_tiles_for(host::CpuIsa isa) {
#ifdef SMJ_X86
  if (isa == host::CpuIsa::kAvx512) return sum_tiles_avx512<Act, Out>;
  if (isa == host::CpuIsa::kAvx2) return sum_tiles_avx2<Act, Out>;
#endif
  return sum_tiles_portable<Act, Out>;
}

// Sums fewer columns than a tile, over copies that have a tile's length.
template <typename Act, typename Out>
void sum_tail(const Stretch<Act>& stretch, SumTiles<Act, Out> sum_tiles, int column, int count,
              Out* out) {
  Act copies[kMaxTopK + 1][kTile];
  const auto copy = [&](int to, const Act* row) {
    std::memcpy(copies[to], row + column, count * sizeof(Act));
    std::memset(copies[to] + count, 0, (kTile - count) * sizeof(Act));
    return copies[to];
  };
  TokenRows<Act> token = stretch.token;
  for (int k = 0; k < token.num_rows; ++k) token.rows[k] = copy(k, token.rows[k]);
  if (token.shared != nullptr) token.shared = copy(kMaxTopK, token.shared);
  Out tile[kTile];
  sum_tiles({token, stretch.next, stretch.routed_factor, kTile, false}, 0, kTile, tile);
  std::memcpy(out, tile, count * sizeof(Out));
}

// Sums columns [column, column + count) into out, which begins there.
template <typename Act, typename Out>
void sum_columns(const Stretch<Act>& stretch, SumTiles<Act, Out> sum_tiles, int column, int count,
                 Out* out) {
  const int whole = count / kTile * kTile;
  if (whole > 0) sum_tiles(stretch, column, whole, out);
  if (whole < count) sum_tail(stretch, sum_tiles, column + whole, count - whole, out + whole);
}

}  // namespace moe
}  // namespace sgl_moe_jit
