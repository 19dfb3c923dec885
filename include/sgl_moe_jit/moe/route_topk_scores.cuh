// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk_scores.cuh: scores of logits, weights of the chosen, and scores as integers that
// order like them. Device code only. For moe/route_topk.cuh.
//
// torch's formulas, operation by operation, without fast math. Lane l of a warp holds experts l,
// l + 32, l + 64, ... of its token.
#pragma once

#include <cmath>
#include <cstdint>

#include "sgl_moe_jit/device/vector.cuh"
#include "sgl_moe_jit/moe/route_topk_params.h"

namespace sgl_moe_jit {
namespace moe {
namespace route {

constexpr uint32_t kAll = 0xffffffffu;
constexpr int32_t kSignless = 0x7fffffff;
constexpr int32_t kClosed = -kSignless - 1;  // not to be chosen
constexpr int32_t kNan = kClosed + 1;        // chosen last
constexpr int32_t kNegInfinity = static_cast<int32_t>(0xff800000u) ^ kSignless;

// Orders as x does, with NaN below -infinity and -0 equal to 0: of one sign, floats read as
// integers order like their magnitudes.
__device__ __forceinline__ int32_t order_key(float x) {
  if (x != x) return kNan;
  const int32_t bits = __float_as_int(x == 0.0f ? 0.0f : x);
  return bits < 0 ? bits ^ kSignless : bits;
}

__device__ __forceinline__ float value_of(int32_t key) {
  return __int_as_float(key < 0 ? key ^ kSignless : key);
}

__device__ __forceinline__ float warp_max(float x) {
  return value_of(__reduce_max_sync(kAll, order_key(x)));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}

template <typename Logit>
__device__ __forceinline__ float rounded(const RouteParams& p, float x) {
  return p.flags & kRoundScores ? device::to_float(device::from_float<Logit>(x)) : x;
}

// What a softmax divides by, and takes off its logits.
struct Softmax {
  float top = 0.0f, total = 1.0f;
};

template <typename Logit>
__device__ __forceinline__ float softmax_of(const RouteParams& p, float exponential, float total) {
  return rounded<Logit>(p, exponential / total);
}

template <typename Logit>
__device__ __forceinline__ float sigmoid_of(const RouteParams& p, float x) {
  return rounded<Logit>(p, 1.0f / (1.0f + expf(-x)));
}

template <typename Logit>
__device__ __forceinline__ float sqrt_softplus_of(const RouteParams& p, float x) {
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return rounded<Logit>(p, sqrtf(rounded<Logit>(p, softplus)));
}

template <typename Logit>
__device__ __forceinline__ float score_of(const RouteParams& p, float x, const Softmax& softmax) {
  if (p.score_function == ScoreFunction::kSigmoid) return sigmoid_of<Logit>(p, x);
  if (p.score_function == ScoreFunction::kSqrtSoftplus) return sqrt_softplus_of<Logit>(p, x);
  return softmax_of<Logit>(p, expf(x - softmax.top), softmax.total);
}

// Logits in, scores out; of a softmax, what its scores were made with.
template <typename Logit, int kValues>
__device__ __forceinline__ Softmax to_scores(const RouteParams& p, float (&x)[kValues], int lane) {
  Softmax softmax;
  if (p.score_function == ScoreFunction::kSigmoid) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = sigmoid_of<Logit>(p, x[i]);
  } else if (p.score_function == ScoreFunction::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = sqrt_softplus_of<Logit>(p, x[i]);
  } else {
    float top = -INFINITY, total = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i * 32 + lane < p.num_experts) top = fmaxf(top, x[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = expf(x[i] - top);
      if (i * 32 + lane < p.num_experts) total += x[i];
    }
    softmax = {top, warp_sum(total)};
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = softmax_of<Logit>(p, x[i], softmax.total);
  }
  return softmax;
}

// Logits of the chosen in, their weights out; 0 where a lane has none.
template <typename Logit>
__device__ __forceinline__ void to_weights(const RouteParams& p, float (&x)[2], Softmax softmax,
                                           int lane) {
  const bool there[2] = {lane < p.top_k, lane + 32 < p.top_k};
  if ((p.flags & kScoreAfterTopK) && p.score_function == ScoreFunction::kSoftmax) {
    softmax.top = warp_max(fmaxf(there[0] ? x[0] : -INFINITY, there[1] ? x[1] : -INFINITY));
    float total = there[0] ? expf(x[0] - softmax.top) : 0.0f;
    if (there[1]) total += expf(x[1] - softmax.top);
    softmax.total = warp_sum(total);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) x[h] = there[h] ? score_of<Logit>(p, x[h], softmax) : 0.0f;
  if (p.flags & kRenormalize) {
    float total = rounded<Logit>(p, warp_sum(x[0] + x[1]));
    if (p.flags & kClampEpsilon) {
      total = total < p.epsilon ? p.epsilon : total;  // NaN stays
    } else {
      total += p.epsilon;
    }
    if (total == 0.0f) total = 1.0f;  // K weights of zero stay zero
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = rounded<Logit>(p, x[h] / total);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) x[h] = rounded<Logit>(p, __fmul_rn(x[h], p.factor));
}

__device__ __forceinline__ float load_as(FloatType type, const void* p, int64_t item) {
  if (type == FloatType::kBFloat16) {
    return device::to_float(static_cast<const __nv_bfloat16*>(p)[item]);
  }
  if (type == FloatType::kFloat16) return device::to_float(static_cast<const __half*>(p)[item]);
  return static_cast<const float*>(p)[item];
}

__device__ __forceinline__ void store_as(FloatType type, void* p, int64_t item, float x) {
  if (type == FloatType::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[item] = device::from_float<__nv_bfloat16>(x);
  } else if (type == FloatType::kFloat16) {
    static_cast<__half*>(p)[item] = device::from_float<__half>(x);
  } else {
    static_cast<float*>(p)[item] = x;
  }
}

}  // namespace route
}  // namespace moe
}  // namespace sgl_moe_jit
