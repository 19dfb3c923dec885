// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_cpu.cc: finalize, residual add and RMSNorm in one pass on a CPU;
// moe/finalize_norm_params.h has the formula and the order of operations.
//
// Cost per token as in moe/finalize_norm.cuh. The row stays in float32 in the first two caches from
// its sum to its output. Everything after the sum is compiled for several instruction sets.
#include "finalize_norm_cpu.h"

#include <algorithm>

#include "sgl_moe_jit/moe/finalize_norm_math.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

// Columns that are summed and have their residual added while they are in the first-level cache.
constexpr int kStrip = 8 * kTile;
constexpr int kLeavesABlock = kNormBlock / kNormLeaf;

// The sum of n leaves, at most a block's, as a balanced binary tree over neighbours. Leaves beyond
// n are +0 and change nothing, since no leaf is negative. Between two buffers: in place, gcc sees a
// dependence between the halves that is none.
SMJ_INLINE float tree_sum(float* leaves, int n) {
  float other[kLeavesABlock / 2];
  float* from = leaves;
  float* to = other;
  while (n > 1) {
    if (n % 2 != 0) from[n++] = 0.0f;
    n /= 2;
    for (int i = 0; i < n; ++i) to[i] = from[2 * i] + from[2 * i + 1];
    std::swap(from, to);
  }
  return from[0];
}

// The sum of a row's squares. The row has zeros up to a whole leaf.
SMJ_INLINE float sum_of_squares(const float* row, int width) {
  float total = 0.0f;
  for (int first = 0; first < width; first += kNormBlock) {
    float leaves[kLeavesABlock];
    const int n = (std::min(width - first, kNormBlock) + kNormLeaf - 1) / kNormLeaf;
    const float* s = row + first;
    for (int l = 0; l < n; ++l) {
      float q = s[4 * l] * s[4 * l];  // fma(s, s, +0)
      q = __builtin_fmaf(s[4 * l + 1], s[4 * l + 1], q);
      q = __builtin_fmaf(s[4 * l + 2], s[4 * l + 2], q);
      leaves[l] = __builtin_fmaf(s[4 * l + 3], s[4 * l + 3], q);
    }
    total += tree_sum(leaves, n);
  }
  return total;
}

// The largest magnitude of a row, NaN apart. By their bits: gcc vectorises no maximum of floats.
SMJ_INLINE float largest(const float* row, int width) {
  int32_t most = 0;
  for (int i = 0; i < width; ++i) {
    const int32_t magnitude = static_cast<int32_t>(host::bits_of(row[i]) & 0x7fffffffu);
    most = std::max(most, magnitude > 0x7f800000 ? 0 : magnitude);
  }
  return host::float_of(static_cast<uint32_t>(most));
}

// What the instruction set decides beside how NormTokens is compiled.
template <typename Act>
struct Vectors {
  SumTiles<Act, float> sum_tiles;
  host::Conversions<Act> convert;
};

template <typename Act>
struct NormTokens {
  // Tokens [begin, end).
  static SMJ_INLINE void run(const FinalizeNormParams* params, FloatType weight,
                             const Vectors<Act>* vectors, int64_t begin, int64_t end) {
    const FinalizeNormParams& p = *params;
    const int width = p.sum.hidden_dim;
    for (TokenWalk<Act> walk(p.sum, weight, begin, end - 1); !walk.done(); walk.advance()) {
      const int64_t t = walk.index();
      float row[kMaxNormHidden];
      add(p, {walk.token(), walk.next(), factor_of(p.sum, walk.token()), width, false}, *vectors, t,
          row);
      for (int i = width; i % kNormLeaf != 0; ++i) row[i] = 0.0f;
      const float inv = math::inverse_rms(sum_of_squares(row, width), width, p.eps);
      normalise(p, *vectors, t, inv, row, walk.next());
      if (p.scale != nullptr) quantise(p, t, row);
    }
  }

  // s, in float32 into row and rounded into residual_out.
  static SMJ_INLINE void add(const FinalizeNormParams& p, const Stretch<Act>& stretch,
                             const Vectors<Act>& vectors, int64_t token, float* row) {
    const Act* residual = static_cast<const Act*>(p.residual) + token * p.residual_stride;
    Act* residual_out = static_cast<Act*>(p.residual_out) + token * p.residual_out_stride;
    const size_t out_size = p.scale == nullptr ? sizeof(Act) : sizeof(host::Float8E4M3);
    const char* out = static_cast<const char*>(p.sum.out) + token * p.sum.out_stride * out_size;
    float wide[kStrip];
    for (int column = 0; column < stretch.end; column += kStrip) {
      const int count = std::min(kStrip, stretch.end - column);
      float* s = row + column;
      prefetch(residual + column + 2 * kStrip, kStrip * sizeof(Act));
      prefetch(out + (column + 2 * kStrip) * out_size, kStrip * out_size);
      sum_columns(stretch, vectors.sum_tiles, column, count, s);
      vectors.convert.widen(residual + column, count, wide);
      for (int i = 0; i < count; ++i) s[i] += wide[i];
      vectors.convert.narrow(s, count, residual_out + column);
    }
  }

  // n, rounded into out; where that is quantised, in place of s.
  static SMJ_INLINE void normalise(const FinalizeNormParams& p, const Vectors<Act>& vectors,
                                   int64_t token, float inv, float* row,
                                   const TokenRows<Act>& next) {
    const Act* norm_weight = static_cast<const Act*>(p.norm_weight);
    Act* out = static_cast<Act*>(p.sum.out) + token * p.sum.out_stride;
    float wide[kStrip];
    for (int column = 0; column < p.sum.hidden_dim; column += kStrip) {
      const int count = std::min(kStrip, p.sum.hidden_dim - column);
      float* s = row + column;
      prefetch_more(next, column);
      vectors.convert.widen(norm_weight + column, count, wide);
      for (int i = 0; i < count; ++i) wide[i] = math::normalised(s[i], inv, wide[i]);
      if (p.scale == nullptr) {
        vectors.convert.narrow(wide, count, out + column);
      } else {
        std::copy_n(wide, count, s);
      }
    }
  }

  // Keeps the memory busy while a row is normalised: asks for what the next sum will want beyond
  // kAheadBytes.
  static SMJ_INLINE void prefetch_more(const TokenRows<Act>& next, int column) {
    constexpr int kBytes = kStrip * sizeof(Act) / 2;
    const int begin = kAheadBytes + column / kStrip * kBytes;
    for (int k = 0; k < next.num_rows; ++k) {
      prefetch(reinterpret_cast<const char*>(next.rows[k]) + begin, kBytes);
    }
  }

  static SMJ_INLINE void quantise(const FinalizeNormParams& p, int64_t token, const float* n) {
    const int width = p.sum.hidden_dim;
    p.scale[token] = math::fp8_scale(largest(n, width));
    const float inverse_scale = math::fp8_inverse_scale(p.scale[token]);
    auto* out = static_cast<host::Float8E4M3*>(p.sum.out) + token * p.sum.out_stride;
    for (int i = 0; i < width; ++i) host::store(out + i, n[i] * inverse_scale);
  }
};

template <typename Act>
void run(const FinalizeNormParams& p, FloatType weight, host::CpuIsa isa,
         const host::Workers& workers) {
  const int64_t rows = p.sum.top_k + 3 + (p.sum.shared != nullptr);
  const int64_t bytes_a_token = static_cast<int64_t>(sizeof(Act)) * p.sum.hidden_dim * rows;
  const Vectors<Act> vectors{sum_tiles_for<Act, float>(isa), host::conversions_for<Act>(isa)};
  host::parallel_for(p.sum.num_tokens, bytes_a_token, workers, [&](int64_t begin, int64_t end) {
    host::run_for_isa<NormTokens<Act>>(isa, &p, weight, &vectors, begin, end);
  });
}

}  // namespace

void finalize_norm_cpu(const FinalizeNormParams& p, FloatType activation, FloatType weight,
                       host::CpuIsa isa, const host::Workers& workers) {
  switch (activation) {
    case FloatType::kBFloat16:
      return run<host::BFloat16>(p, weight, isa, workers);
    case FloatType::kFloat16:
      return run<host::Float16>(p, weight, isa, workers);
    case FloatType::kFloat32:
      return run<float>(p, weight, isa, workers);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
