// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_sum.cuh: some columns of one token's finalized row, in a thread's registers. Device
// code only; what every kernel that finishes rows is built from.
//
// Arithmetic, the same on every path and on the CPU, so that a row alone equals the row in a batch:
//   acc = +0; for k ascending, present rows only: acc = fma(w, g, acc); acc *= factor unless it is
//   1; acc = fma(gate, shared, acc); out = round_to_nearest_even(acc). Without a gate it is 1,
//   which makes the last step a plain sum; then a token without rows copies shared, or writes +0.
#pragma once

#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/moe/activation_math.h"
#include "sgl_moe_jit/moe/finalize_params.h"

namespace sgl_moe_jit {
namespace moe {

// The type of weights that are all 1 and not in memory.
struct UnitWeight {};
// Of weights whose type FinalizeParams tells at run time, or that are all 1: a branch before the
// routing is there, for a quarter of the kernels to build.
struct AnyWeight {};

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A token's routing, spread over the lanes of each warp: lane k holds slot k (and k + 32), so that
// two loads fetch all of it without an alignment demand, and a shuffle hands a slot to everybody.
// kTopK is known at compile time; 0 means top_k, up to 64.
template <typename Weight, int kTopK>
class Routing {
 public:
  static constexpr bool kTwo = kTopK == 0 || kTopK > kWarp;

  __device__ __forceinline__ Routing(const FinalizeParams& p, int64_t token) {
    const int lane = threadIdx.x % kWarp;
    top_k_ = kTopK > 0 ? kTopK : p.top_k;
    // With no more slots than lanes the rest repeat: no predicate, and nothing beyond the token.
    const int64_t slot = token * top_k_ + (kTopK > 0 && kTopK <= kWarp ? lane % kTopK : lane);
    row_of_ = p.row_of + slot;
    weights_ = static_cast<const char*>(p.weights);
    if constexpr (kAny) {
      type_ = p.weight_type;
      if (weights_ != nullptr) weights_ += slot * (type_ == WeightType::kFloat32 ? 4 : 2);
    } else {
      weights_ += slot * static_cast<int64_t>(sizeof(Weight));
    }
  }

  __device__ __forceinline__ void prefetch() const {
    if (threadIdx.x == 0) {
      device::prefetch_l2(row_of_);
      if (!kUnit && (!kAny || weights_ != nullptr)) device::prefetch_l2(weights_);
    }
  }

  // Reads: wait first. Every lane of the warp must call it.
  __device__ __forceinline__ void load() {
    fetch(0, row_[0], weight_[0]);
    if constexpr (kTwo) fetch(kWarp, row_[1], weight_[1]);
  }

  // Whether the token has a row at all.
  __device__ __forceinline__ bool any() const {
    return __any_sync(kAllLanes, row_[0] >= 0 || (kTwo && row_[kTwo] >= 0));
  }

  // Slot k's row, negative when absent or beyond top_k, and its weight. Every lane must call them.
  __device__ __forceinline__ int32_t row(int k) const {
    return __shfl_sync(kAllLanes, kTwo && k >= kWarp ? row_[kTwo] : row_[0], k % kWarp);
  }
  // An absent slot's is -0: with a row of zeros its product is -0, which changes no sum, be that
  // +0, -0 or NaN.
  __device__ __forceinline__ float weight(int k) const {
    return __shfl_sync(kAllLanes, kTwo && k >= kWarp ? weight_[kTwo] : weight_[0], k % kWarp);
  }

 private:
  __device__ __forceinline__ void fetch(int ahead, int32_t& row, float& weight) const {
    row = -1;
    weight = -0.0f;
    if (kTwo && static_cast<int>(threadIdx.x % kWarp) + ahead >= top_k_) return;
    row = row_of_[ahead];
    weight = weight_at(ahead);
    if (row < 0) weight = -0.0f;
  }

  __device__ __forceinline__ float weight_at(int ahead) const {
    if constexpr (kUnit) {
      return 1.0f;
    } else if constexpr (kAny) {
      if (weights_ == nullptr) return 1.0f;
      if (type_ == WeightType::kFloat32) return at<float>(ahead);
      return type_ == WeightType::kBFloat16 ? at<__nv_bfloat16>(ahead) : at<__half>(ahead);
    } else {
      return at<Weight>(ahead);
    }
  }
  template <typename T>
  __device__ __forceinline__ float at(int ahead) const {
    return device::to_float(reinterpret_cast<const T*>(weights_)[ahead]);
  }

  static constexpr bool kUnit = std::is_same_v<Weight, UnitWeight>;
  static constexpr bool kAny = std::is_same_v<Weight, AnyWeight>;

  const int32_t* row_of_;
  const char* weights_;
  WeightType type_;
  int top_k_;
  int32_t row_[1 + kTwo];
  float weight_[1 + kTwo];
};

// kVec columns of one token in a thread's hands. kTopK slots (0: p.top_k of them), kRows rows in
// flight; kGate: p.gate_logits is there.
template <typename Act, typename Weight, int kTopK, bool kGate, int kVec, int kRows>
class TokenSum {
 public:
  using Vector = device::Vector<Act, kVec>;

  __device__ __forceinline__ TokenSum(const FinalizeParams& p, int64_t token, int column)
      : p_(p),
        routing_(p, token),
        rows_(static_cast<const Act*>(p.gemm2_out) + column),
        shared_(static_cast<const Act*>(p.shared) + (token * p.shared_stride + column)),
        stride_bytes_(static_cast<uint32_t>(p.gemm2_stride * sizeof(Act))) {
    if constexpr (kGate) {
      gate_ = static_cast<const char*>(p.gate_logits) + token * (p.gate_is_float ? 4 : sizeof(Act));
    }
  }

  // Asks L2 for what the first reads will want; they may find it there when the wait is over. A
  // line of the shared row is asked for by one thread.
  __device__ __forceinline__ void prefetch() const {
    routing_.prefetch();
    constexpr int kThreadsALine = 128 / (sizeof(Act) * kVec);
    if (p_.shared != nullptr && threadIdx.x % kThreadsALine == 0) device::prefetch_l2(shared_);
  }

  // Everything from here on reads: wait first. Every lane of a warp must make these calls.
  __device__ __forceinline__ void load_routing() { routing_.load(); }

  // Finished columns, rounded.
  __device__ __forceinline__ Vector finished() const {
    float acc[kVec];
    const Vector shared = sum(acc);
    const bool copies = !kGate && p_.shared != nullptr && !routing_.any();
    const Vector packed = device::pack<Act, kVec>(acc);
    return copies ? shared : packed;
  }

  // Finished columns before they are rounded.
  __device__ __forceinline__ void unrounded(float (&acc)[kVec]) const { sum(acc); }

  // Goes on to columns further right.
  __device__ __forceinline__ void advance(int columns) {
    rows_ += columns;
    shared_ += columns;
  }

 private:
  static_assert(kTopK == 0 || kTopK % kRows == 0, "slots would be left over");
  static_assert(kWarp % kRows == 0 || kTopK > 0, "a chunk would lie in two registers");

  // Returns the shared columns, if there are any.
  __device__ __forceinline__ Vector sum(float (&acc)[kVec]) const {
    Vector shared{};
    if (p_.shared != nullptr) shared = device::load<Act, kVec>(shared_);
    float logit = 0.0f;
    if constexpr (kGate) {
      logit = p_.gate_is_float ? *reinterpret_cast<const float*>(gate_)
                               : device::to_float(*reinterpret_cast<const Act*>(gate_));
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) acc[i] = 0.0f;
    if constexpr (kTopK == kRows) {
      add_rows(0, acc);
    } else {
      const int top_k = kTopK > 0 ? kTopK : p_.top_k;
#pragma unroll 1
      for (int k = 0; k < top_k; k += kRows) add_rows(k, acc);
    }
    // Intrinsics, so that the compiler fuses no product with a sum.
    if (p_.routed_factor != 1.0f && routing_.any()) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) acc[i] = __fmul_rn(acc[i], p_.routed_factor);
    }
    if (p_.shared != nullptr) {
      const float gate = kGate ? math::sigmoid(logit) : 1.0f;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        acc[i] = __fmaf_rn(gate, shared.as_float(i), acc[i]);
      }
    }
    return shared;
  }

  // Adds kRows slots from the k-th on, in ascending order, all their loads in flight together. An
  // absent row is not loaded.
  __device__ __forceinline__ void add_rows(int first, float (&acc)[kVec]) const {
    Vector loaded[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      loaded[k] = {};
      device::load_row(loaded[k], rows_, routing_.row(first + k), stride_bytes_);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const float weight = routing_.weight(first + k);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        acc[i] = __fmaf_rn(weight, loaded[k].as_float(i), acc[i]);
      }
    }
  }

  const FinalizeParams& p_;
  Routing<Weight, kTopK> routing_;
  const Act* rows_;
  const Act* shared_;
  const char* gate_ = nullptr;
  uint32_t stride_bytes_;
};

}  // namespace moe
}  // namespace sgl_moe_jit
