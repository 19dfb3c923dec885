// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk.cuh: K experts of each token and their weights, from the router's logits. Device
// code only. Names and settings: moe/route_topk_params.h.
//
//   bytes = T * (E * logit + K * (weight + 4))
//
// A warp a token, with its experts in registers. Choice values are compared as integers, so that
// one warp reduction finds the largest, and another the lowest expert that has it. The scores of
// the K chosen ones are computed again from their logits, which gives the same bits.
#pragma once

#include <cstdint>

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/route_topk_groups.cuh"
#include "sgl_moe_jit/moe/route_topk_params.h"
#include "sgl_moe_jit/moe/route_topk_scores.cuh"

namespace sgl_moe_jit {
namespace moe {
namespace route {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// The K largest keys' experts: lane l gets the l-th and the (l + 32)-th.
template <int kValues>
__device__ __forceinline__ void choose(const RouteParams& p, int32_t (&key)[kValues],
                                       int32_t (&ids)[2], int lane) {
#pragma unroll 1
  for (int k = 0; k < p.top_k; ++k) {
    int32_t best = kClosed;
#pragma unroll
    for (int i = 0; i < kValues; ++i) best = max(best, key[i]);
    best = __reduce_max_sync(kAll, best);
    int32_t lowest = kSignless;
#pragma unroll
    for (int i = kValues - 1; i >= 0; --i) {
      if (key[i] == best) lowest = i * 32 + lane;
    }
    const int32_t id = __reduce_min_sync(kAll, lowest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (i * 32 + lane == id) key[i] = kClosed;
    }
    if (k == lane) ids[0] = id;
    if (k == lane + 32) ids[1] = id;
  }
}

__device__ __forceinline__ int64_t first_padded_row(const RouteParams& p) {
  if (p.num_valid == nullptr) return p.valid_rows;
  return p.num_valid_words == 2 ? *static_cast<const int64_t*>(p.num_valid)
                                : *static_cast<const int32_t*>(p.num_valid);
}

}  // namespace route

// kValues * 32 is at least E.
template <typename Logit, int kValues>
__global__ void __launch_bounds__(route::kThreads) route_topk_kernel(const RouteParams p) {
  using namespace route;
  // Logits, bias and the count of rows are a predecessor's, and it may still read what the outputs'
  // memory held before.
  device::pdl_wait();
  device::pdl_launch_dependents();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (token >= p.num_tokens) return;
  int32_t ids[2] = {-1, -1};
  float weights[2] = {0.0f, 0.0f};
  if (token < first_padded_row(p)) {
    const Logit* logits = static_cast<const Logit*>(p.logits) + token * p.logits_stride;
    float x[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int expert = i * 32 + lane;
      x[i] = expert < p.num_experts ? device::to_float(logits[expert]) : 0.0f;
    }
    Softmax softmax;
    if (!(p.flags & kScoreAfterTopK)) softmax = to_scores<Logit>(p, x, lane);
    int32_t key[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int expert = i * 32 + lane;
      const bool there = expert < p.num_experts;
      if (p.bias != nullptr && there) x[i] = __fadd_rn(x[i], p.bias[expert]);
      key[i] = there ? order_key(x[i]) : kClosed;
    }
    if (p.topk_group < p.n_group) close_groups(p, key, lane);
    choose(p, key, ids, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane + 32 * h < p.top_k) weights[h] = device::to_float(logits[ids[h]]);
    }
    to_weights<Logit>(p, weights, softmax, lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane + 32 * h >= p.top_k) continue;
    const int64_t slot = token * p.top_k + lane + 32 * h;
    if (p.scale != nullptr && ids[h] >= 0) {
      weights[h] = __fmul_rn(weights[h], load_as(p.scale_type, p.scale, ids[h]));
    }
    p.ids[slot] = ids[h];
    store_as(p.weights_type, p.weights, slot, weights[h]);
  }
}

}  // namespace moe
}  // namespace sgl_moe_jit
