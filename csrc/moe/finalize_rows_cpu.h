// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_rows_cpu.h: which rows make up a token, for the CPU kernels that finish rows. No
// TVM-FFI here.
#pragma once

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/moe/activation_math.h"
#include "sgl_moe_jit/moe/finalize_params.h"

namespace sgl_moe_jit {
namespace moe {

// Of activations, weights and logits.
enum class FloatType { kFloat32, kBFloat16, kFloat16 };

SMJ_INLINE float load_float(const void* values, FloatType type, int64_t i) {
  switch (type) {
    case FloatType::kBFloat16:
      return host::to_float(static_cast<const host::BFloat16*>(values)[i]);
    case FloatType::kFloat16:
      return host::to_float(static_cast<const host::Float16*>(values)[i]);
    default:
      return static_cast<const float*>(values)[i];
  }
}

// Where a token's values lie: the rows it has, in slot order, with their weights; its shared row
// and what that is multiplied by.
template <typename Act>
struct TokenRows {
  const Act* rows[kMaxTopK];
  float weights[kMaxTopK];
  const Act* shared = nullptr;
  float gate = 1.0f;
  int num_rows = 0;

  SMJ_INLINE void load(const FinalizeParams& p, FloatType weight, int64_t token) {
    num_rows = 0;
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      if (p.row_of[slot] < 0) continue;
      rows[num_rows] = static_cast<const Act*>(p.gemm2_out) + p.row_of[slot] * p.gemm2_stride;
      weights[num_rows++] = p.weights == nullptr ? 1.0f : load_float(p.weights, weight, slot);
    }
    if (p.shared == nullptr) return;
    shared = static_cast<const Act*>(p.shared) + token * p.shared_stride;
    if (p.gate_logits != nullptr) {
      gate = math::sigmoid(p.gate_is_float
                               ? static_cast<const float*>(p.gate_logits)[token]
                               : host::to_float(static_cast<const Act*>(p.gate_logits)[token]));
    }
  }
};

// What a token's routed sum is multiplied by; without a row there is none, and +0 it stays.
template <typename Act>
SMJ_INLINE float factor_of(const FinalizeParams& p, const TokenRows<Act>& token) {
  return token.num_rows > 0 ? p.routed_factor : 1.0f;
}

// A walk over tokens [first, last], each with the one that comes after it.
template <typename Act>
class TokenWalk {
 public:
  SMJ_INLINE TokenWalk(const FinalizeParams& p, FloatType weight, int64_t first, int64_t last)
      : p_(p), weight_(weight), index_(first), last_(last) {
    load(first, both_[0]);
    load(first + 1, both_[1]);
  }

  SMJ_INLINE bool done() const { return index_ > last_; }
  SMJ_INLINE int64_t index() const { return index_; }
  SMJ_INLINE const TokenRows<Act>& token() const { return both_[turn_]; }
  SMJ_INLINE const TokenRows<Act>& next() const { return both_[1 - turn_]; }
  SMJ_INLINE void advance() {
    load(index_ + 2, both_[turn_]);
    turn_ = 1 - turn_;
    ++index_;
  }

 private:
  // After the last comes one without anything.
  SMJ_INLINE void load(int64_t token, TokenRows<Act>& rows) {
    if (token > last_) {
      rows = {};
    } else {
      rows.load(p_, weight_, token);
    }
  }

  const FinalizeParams& p_;
  FloatType weight_;
  int64_t index_, last_;
  TokenRows<Act> both_[2];
  int turn_ = 0;
};

}  // namespace moe
}  // namespace sgl_moe_jit
