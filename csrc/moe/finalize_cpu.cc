// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu.cc: out[t] = gate[t] * shared[t] + factor * sum_k w[t, k] * gemm2_out[row(t, k)]
// on a CPU.
//
// Cost per token as in moe/finalize.cuh; memory bandwidth is the wall (docs/kernel_notes.md).
#include "finalize_cpu.h"

#include <algorithm>
#include <cstring>

namespace sgl_moe_jit {
namespace moe {
namespace {

// Columns handed to a thread together, so that threads can share a token.
constexpr int kSlab = 8 * kTile;

// Traffic from which on rows come from memory, whoever wrote them, and output had better not push
// anything out of the caches. Below it the output's next reader finds it there: with that reader
// counted in, streaming took 120 instead of 104 us at 64 tokens of hidden 7168 in cache, as long at
// 128 and 1085 instead of 1201 us at 256, 37 MB (2-core EPYC virtual machine, 32 MB of last-level
// cache, 2026-11-29).
constexpr int64_t kStreamBytes = 32 << 20;

int64_t slabs_of(const FinalizeParams& p) { return (p.hidden_dim + kSlab - 1) / kSlab; }

// What a token without rows and without a gate gets: its shared row, -0 and NaN included, or +0.
template <typename Act>
void copy_or_clear(const Act* shared, int column, int count, Act* out) {
  if (shared == nullptr) {
    std::memset(out, 0, count * sizeof(Act));
  } else if (shared + column != out) {
    std::memcpy(out, shared + column, count * sizeof(Act));
  }
}

// Finishes slabs [begin, end), counted through all tokens.
template <typename Act>
void finish_slabs(const FinalizeParams& p, FloatType weight, SumTiles<Act, Act> sum_tiles,
                  bool stream, int64_t begin, int64_t end) {
  const int64_t slabs = slabs_of(p), first = begin / slabs, last = (end - 1) / slabs;
  for (TokenWalk<Act> walk(p, weight, first, last); !walk.done(); walk.advance()) {
    const TokenRows<Act>& token = walk.token();
    const int64_t t = walk.index();
    const int64_t from = t == first ? begin % slabs * kSlab : 0;
    const int64_t to = std::min<int64_t>((end - t * slabs) * kSlab, p.hidden_dim);
    const int column = static_cast<int>(from), count = static_cast<int>(to - from);
    Act* out = static_cast<Act*>(p.out) + t * p.out_stride + column;
    if (token.num_rows == 0 && p.gate_logits == nullptr) {
      copy_or_clear(token.shared, column, count, out);
    } else {
      const Stretch<Act> stretch{token, walk.next(), factor_of(p, token), column + count, stream};
      sum_columns(stretch, sum_tiles, column, count, out);
    }
  }
#ifdef SMJ_X86
  if (stream) _mm_sfence();
#endif
}

template <typename Act>
void run(const FinalizeParams& p, FloatType weight, host::CpuIsa isa,
         const host::Workers& workers) {
  const SumTiles<Act, Act> sum_tiles = sum_tiles_for<Act, Act>(isa);
  const int64_t rows = p.top_k + 1 + (p.shared != nullptr);
  const int64_t bytes_a_token = static_cast<int64_t>(sizeof(Act)) * p.hidden_dim * rows;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(p.out) | (p.out_stride * sizeof(Act))) % 64 == 0;
  const bool stream = aligned && p.num_tokens * bytes_a_token >= kStreamBytes;
  host::parallel_for(p.num_tokens * slabs_of(p), bytes_a_token / slabs_of(p), workers,
                     [&](int64_t begin, int64_t end) {
                       finish_slabs<Act>(p, weight, sum_tiles, stream, begin, end);
                     });
}

}  // namespace

void finalize_cpu(const FinalizeParams& p, FloatType activation, FloatType weight, host::CpuIsa isa,
                  const host::Workers& workers) {
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
