// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_row.cuh: pieces of one token's row, from its sum to its output. Device code
// only.
#pragma once

#include <cuda_fp8.h>

#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/moe/finalize_norm_math.h"
#include "sgl_moe_jit/moe/finalize_norm_params.h"
#include "sgl_moe_jit/moe/finalize_sum.cuh"

namespace sgl_moe_jit {
namespace moe {

// device::prefetch_l2 without a branch around it, so that the address stands ready before the wait.
__device__ __forceinline__ void prefetch_l2_if(bool wanted, const void* p) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %1, 0; @q prefetch.global.L2 [%0]; }" ::"l"(p),
               "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ FinalizeParams without_shared(const FinalizeParams& sum) {
  FinalizeParams routed = sum;
  routed.shared = nullptr;
  return routed;
}

// A piece is kColumns columns of the row: a vector, or four columns one by one where kVec is 1. A
// thread's pieces are named by how far they are ahead of its first. Pieces beyond the row are +0.
// Every lane of a warp must make the same calls.
template <typename Act, typename Weight, int kTopK, bool kQuantised, int kVec, int kRows>
class NormRow {
 public:
  static constexpr int kColumns = kVec == 1 ? kNormLeaf : kVec;
  using Piece = device::Vector<Act, kColumns>;

  // What stands beside the routed rows.
  struct Sides {
    Piece shared, residual;
  };

  // routed is p.sum without its shared row; see add.
  __device__ __forceinline__ NormRow(const FinalizeNormParams& p, const FinalizeParams& routed,
                                     int64_t token, int column)
      : sum_(routed, token, column < p.sum.hidden_dim ? column : 0),
        left_(p.sum.hidden_dim - column),
        shared_(static_cast<const Act*>(p.sum.shared) + token * p.sum.shared_stride + column),
        residual_(static_cast<const Act*>(p.residual) + token * p.residual_stride + column),
        norm_weight_(static_cast<const Act*>(p.norm_weight) + column),
        has_shared_(p.sum.shared != nullptr),
        residual_out_(static_cast<Act*>(p.residual_out) + token * p.residual_out_stride + column),
        out_(static_cast<Out*>(p.sum.out) + token * p.sum.out_stride + column) {
    if (p.sum.gate_logits != nullptr) {
      gate_ = static_cast<const char*>(p.sum.gate_logits) +
              token * (p.sum.gate_is_float ? sizeof(float) : sizeof(Act));
      gate_is_float_ = p.sum.gate_is_float;
    }
  }

  // Asks L2 for what the first reads will want; a line is asked for by one thread.
  __device__ __forceinline__ void prefetch(int ahead) const {
    constexpr int kThreadsALine = 128 / (sizeof(Act) * kColumns);
    const bool asks = threadIdx.x % kThreadsALine == 0 && ahead < left_;
    prefetch_l2_if(asks && has_shared_, shared_ + ahead);
    prefetch_l2_if(asks, residual_ + ahead);
    prefetch_l2_if(asks, norm_weight_ + ahead);
    if (ahead == 0) sum_.prefetch();
  }

  // Everything from here on reads or writes: wait first.
  __device__ __forceinline__ void load_routing() {
    sum_.load_routing();
    if (gate_ == nullptr) return;
    gate_factor_ = gate_is_float_ ? *reinterpret_cast<const float*>(gate_)
                                  : device::to_float(*reinterpret_cast<const Act*>(gate_));
  }
  __device__ __forceinline__ Sides sides(int ahead) const {
    Sides v{};
    v.residual = load(residual_ + ahead, ahead);
    if (has_shared_) v.shared = load(shared_ + ahead, ahead);
    return v;
  }
  __device__ __forceinline__ Piece norm_weight(int ahead) const {
    return load(norm_weight_ + ahead, ahead);
  }

  // s, the finalized columns before their rounding plus the residual. The shared row is added here
  // and not by TokenSum, so that its load need not wait for the routing.
  __device__ __forceinline__ void add(int ahead, const Sides& sides, float (&s)[kColumns]) {
    routed_sum(ahead, s);
    if (has_shared_) {
      const float gate = gate_ == nullptr ? 1.0f : math::sigmoid(gate_factor_);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) s[i] = __fmaf_rn(gate, sides.shared.as_float(i), s[i]);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      s[i] = inside(ahead, i) ? __fadd_rn(s[i], sides.residual.as_float(i)) : 0.0f;
    }
  }

  __device__ __forceinline__ void store_sum(int ahead, const float (&s)[kColumns]) const {
    store(residual_out_ + ahead, ahead, device::pack<Act, kColumns>(s));
  }

  // Turns s into n.
  __device__ __forceinline__ void normalise(float (&s)[kColumns], float inv,
                                            const Piece& norm_weight) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) s[i] = math::normalised(s[i], inv, norm_weight.as_float(i));
  }

  __device__ __forceinline__ void store(int ahead, const float (&n)[kColumns],
                                        float inverse_scale) const {
    if constexpr (kQuantised) {
      store(out_ + ahead, ahead, quantised(n, inverse_scale));
    } else {
      store(out_ + ahead, ahead, device::pack<Act, kColumns>(n));
    }
  }

 private:
  using Out = std::conditional_t<kQuantised, uint8_t, Act>;

  __device__ __forceinline__ static device::Vector<uint8_t, kColumns> quantised(
      const float (&n)[kColumns], float inverse_scale) {
    device::Vector<uint8_t, kColumns> v;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      const float2 pair{__fmul_rn(n[i], inverse_scale), __fmul_rn(n[i + 1], inverse_scale)};
      reinterpret_cast<__nv_fp8x2_storage_t*>(&v.raw)[i / 2] =
          __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
    }
    return v;
  }

  // Whether column i of a piece is in the row; a vector is as a whole.
  __device__ __forceinline__ bool inside(int ahead, int i) const {
    return (kVec == 1 ? ahead + i : ahead) < left_;
  }

  // A lane beyond the row reads again where it is.
  __device__ __forceinline__ void routed_sum(int ahead, float (&s)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kColumns; i += kVec) {
      if (inside(ahead, i)) {
        sum_.advance(ahead + i - at_);
        at_ = ahead + i;
      }
      float part[kVec];
      sum_.unrounded(part);
#pragma unroll
      for (int k = 0; k < kVec; ++k) s[i + k] = part[k];
    }
  }

  __device__ __forceinline__ Piece load(const Act* from, int ahead) const {
    Piece v{};
    if constexpr (kVec == 1) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (inside(ahead, i)) v.set(i, from[i]);
      }
    } else if (inside(ahead, 0)) {
      v = device::load<Act, kColumns>(from);
    }
    return v;
  }

  template <typename T>
  __device__ __forceinline__ void store(T* to, int ahead,
                                        const device::Vector<T, kColumns>& v) const {
    if constexpr (kVec == 1) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (inside(ahead, i)) to[i] = v.get(i);
      }
    } else if (inside(ahead, 0)) {
      device::store<T, kColumns>(to, v);
    }
  }

  TokenSum<Act, Weight, kTopK, false, kVec, kRows> sum_;
  const int left_;  // columns from the first piece to the row's end
  int at_ = 0;
  const Act* shared_;
  const Act* residual_;
  const Act* norm_weight_;
  const bool has_shared_;
  Act* residual_out_;
  Out* out_;
  const char* gate_ = nullptr;
  bool gate_is_float_ = false;
  float gate_factor_ = 0.0f;
};

}  // namespace moe
}  // namespace sgl_moe_jit
