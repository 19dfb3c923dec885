// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/waterfill_cpu.cc: the CPU waterfill: count, plan, and each row in order.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "sgl_moe_jit/host/parallel_for.h"
#include "sgl_moe_jit/moe/ep_topk_cpu.h"
#include "sgl_moe_jit/moe/waterfill_checks.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;
using moe::WaterfillMode;
using moe::WaterfillPlan;

// What each rank gets when tokens are poured on the lowest loads, those that do not divide from
// rank start on.
std::vector<int64_t> make_quotas(const WaterfillPlan& plan, int32_t num_ranks, int32_t start) {
  std::vector<int64_t> sorted(plan.load, plan.load + num_ranks);
  std::sort(sorted.begin(), sorted.end());
  // The tokens fill the ranks whose load they reach if they fill all lower ones up to it.
  int64_t filled = 0, sum = 0;
  while (filled < num_ranks) {
    const int64_t next = sorted[static_cast<size_t>(filled)];
    if (next * filled - sum > plan.all_tokens) break;
    sum += next;
    ++filled;
  }
  const int64_t level = (plan.all_tokens + sum) / filled;
  const int64_t highest = sorted[static_cast<size_t>(filled) - 1];
  int64_t rest = plan.all_tokens + sum - level * filled;
  std::vector<int64_t> quotas(static_cast<size_t>(num_ranks), 0);
  for (int32_t i = 0; i < num_ranks; ++i) {
    const int32_t rank = (start + i) % num_ranks;
    if (plan.load[rank] > highest) continue;
    quotas[static_cast<size_t>(rank)] = level - plan.load[rank] + (rest > 0);
    rest -= rest > 0;
  }
  return quotas;
}

void plan_exact(WaterfillPlan* plan, const moe::WaterfillParams& p) {
  const int32_t num_ranks = p.topk.num_ranks, source = p.topk.source_rank;
  const std::vector<int64_t> quotas = make_quotas(*plan, num_ranks, p.remainder_start);
  int64_t before = 0;
  for (int32_t r = 0; r < num_ranks; ++r) {
    const int64_t alone = r == source ? plan->own_tokens : 0;
    const int64_t tokens = std::max<int64_t>(0, p.tokens_per_rank ? p.tokens_per_rank[r] : alone);
    const int64_t stay = std::min(tokens, quotas[static_cast<size_t>(r)]);
    if (r < source) plan->first_away += tokens - stay;
    if (r == source) plan->stay = stay;
    plan->first[r] = before;
    before += quotas[static_cast<size_t>(r)] - stay;
  }
  plan->first[num_ranks] = before;
}

void plan_sampled(WaterfillPlan* plan, const moe::WaterfillParams& p, int64_t pairs) {
  const int32_t num_ranks = p.topk.num_ranks;
  const int64_t load = std::accumulate(plan->load, plan->load + num_ranks, int64_t{0});
  const int64_t added = pairs / std::max(p.topk.top_k, 1);
  const int64_t target = (load + added + num_ranks - 1) / num_ranks;
  plan->everywhere = p.global_counts == nullptr;
  if (*std::max_element(plan->load, plan->load + num_ranks) <= target) plan->everywhere = 1;
  for (int32_t r = 0; r < num_ranks; ++r) {
    const int64_t room = std::max<int64_t>(target - plan->load[r], 0);
    plan->first[r + 1] = plan->first[r] + (r == p.topk.source_rank ? room : room * 10 / 11);
  }
}

template <typename Id>
std::unique_ptr<WaterfillPlan> make_plan(const moe::WaterfillParams& p) {
  auto plan = std::make_unique<WaterfillPlan>();
  const int32_t num_ranks = p.topk.num_ranks;
  plan->own_tokens = plan->all_tokens = moe::count_pairs<Id>(p.topk, plan->load);
  if (p.global_counts) {
    std::copy(p.global_counts, p.global_counts + num_ranks, plan->load);
    plan->all_tokens = std::max<int64_t>(
        0, std::accumulate(p.tokens_per_rank, p.tokens_per_rank + num_ranks, int64_t{0}));
    plan->own_tokens = std::max<int64_t>(0, p.tokens_per_rank[p.topk.source_rank]);
  }
  plan->lowest = *std::min_element(plan->load, plan->load + num_ranks);
  if (p.mode == WaterfillMode::kExact) {
    plan_exact(plan.get(), p);
  } else if (p.mode == WaterfillMode::kSampled) {
    const int64_t pairs = std::accumulate(plan->load, plan->load + num_ranks, int64_t{0});
    for (int32_t r = 0; p.tokens_per_rank && r < num_ranks; ++r) {
      plan->load[r] += p.tokens_per_rank[r];
    }
    plan_sampled(plan.get(), p, pairs);
  }
  return plan;
}

// Ranks of the rows of a chunk. Rows that have no choice come first.
template <typename Id>
void choose_restricted(const WaterfillPlan& plan, const moe::EpTopkParams& p, int64_t begin,
                       int64_t end, int32_t* ranks) {
  const int32_t chunk = static_cast<int32_t>(begin / moe::kChunkRows);
  const int32_t turn = moe::restricted_turn(p.source_rank, chunk, p.num_ranks);
  int64_t tokens = 0;
  for (int64_t row = begin; row < end; ++row) tokens += moe::is_live<Id>(p, row);
  std::vector<uint32_t> keys(static_cast<size_t>(p.num_ranks));
  for (int32_t r = 0; r < p.num_ranks; ++r) {
    const uint32_t height = moe::restricted_height(plan, p.source_rank, chunk, r, tokens);
    const int32_t tie = moe::restricted_tie(r, turn, p.num_ranks);
    keys[static_cast<size_t>(r)] = height << moe::kTieBits | static_cast<uint32_t>(tie);
  }
  const auto key = [&](int32_t rank) -> uint32_t& { return keys[static_cast<size_t>(rank)]; };
  for (const bool choice : {false, true}) {
    for (int64_t row = begin; row < end; ++row) {
      if (!moe::is_live<Id>(p, row)) continue;
      const Id* ids = static_cast<const Id*>(p.topk_ids) + row * p.top_k;
      int32_t best = -1;
      bool has_choice = false;
      for (int k = 0; k < p.top_k; ++k) {
        if (ids[k] < 0) continue;
        const int32_t rank = moe::owner_of(p, ids[k]);
        has_choice |= best >= 0 && rank != best;
        if (best < 0 || key(rank) < key(best)) best = rank;
      }
      if (has_choice != choice) continue;
      ranks[row] = best;
      key(best) += moe::kTokenHeight << moe::kTieBits;
    }
  }
}

template <typename Id>
std::vector<int32_t> choose_ranks(const moe::WaterfillParams& p) {
  const moe::EpTopkParams& topk = p.topk;
  const std::unique_ptr<WaterfillPlan> plan = make_plan<Id>(p);
  std::vector<int32_t> ranks(static_cast<size_t>(topk.num_tokens), 0);
  int64_t token = 0;
  for (int64_t row = 0; row < topk.num_tokens; ++row) {
    if (p.mode == WaterfillMode::kRestricted) {
      if (row % moe::kChunkRows != 0) continue;
      const int64_t end = std::min<int64_t>(row + moe::kChunkRows, topk.num_tokens);
      choose_restricted<Id>(*plan, topk, row, end, ranks.data());
    } else if (moe::is_live<Id>(topk, row)) {
      ranks[static_cast<size_t>(row)] =
          p.mode == WaterfillMode::kSampled
              ? moe::sampled_rank<Id>(*plan, topk, row)
              : moe::exact_rank(*plan, topk.source_rank, topk.num_ranks, token++);
    }
  }
  return ranks;
}

// Before there are outputs, and copies of what is not contiguous.
void check(TensorView topk_ids, TensorView topk_weights, host::Optional<TensorView> num_valid,
           int64_t num_experts, int64_t num_ranks, int64_t source_rank,
           host::Optional<TensorView> global_counts, host::Optional<TensorView> tokens_per_rank,
           int64_t mode, int64_t remainder_start) {
  SMJ_CHECK_VALUE(topk_ids.device().device_type == kDLCPU)
      << "topk_ids: expected a CPU tensor, got device " << host::device_text(topk_ids.device());
  const moe::EpShape shape{num_experts, num_ranks, source_rank, 1};
  const moe::WaterfillParams p = moe::check_waterfill(
      moe::check_ep_topk_inputs(topk_ids, topk_weights, num_valid, shape, 1.0), topk_ids.device(),
      global_counts, tokens_per_rank, mode, remainder_start);
  if (host::is_contiguous(topk_ids)) moe::check_ids_in_range(p.topk);
}

void waterfill_topk(TensorView out_ids, TensorView out_weights, TensorView topk_ids,
                    TensorView topk_weights, host::Optional<TensorView> num_valid,
                    int64_t num_experts, int64_t num_ranks, int64_t source_rank,
                    double shared_weight, host::Optional<TensorView> global_counts,
                    host::Optional<TensorView> tokens_per_rank, int64_t mode,
                    int64_t remainder_start, int64_t threads, int64_t openmp) {
  const moe::EpShape shape{num_experts, num_ranks, source_rank, 1};
  const moe::WaterfillParams p = moe::check_waterfill(
      moe::check_ep_topk(out_ids, out_weights, topk_ids, topk_weights, num_valid, shape,
                         shared_weight),
      topk_ids.device(), global_counts, tokens_per_rank, mode, remainder_start);
  moe::check_ids_in_range(p.topk);
  moe::with_types(p.topk, [&](auto id, auto weight) {
    using Id = decltype(id);
    using Weight = decltype(weight);
    const std::vector<int32_t> ranks = choose_ranks<Id>(p);
    const auto write = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        moe::write_row<Id, Weight>(p.topk, row, ranks[static_cast<size_t>(row)]);
      }
    };
    const int64_t bytes = (2 * p.topk.top_k + 1) * (4 * p.topk.id_words + p.topk.weight_bytes);
    host::parallel_for(p.topk.num_tokens, bytes, host::Workers(threads, openmp), write);
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(waterfill_topk, waterfill_topk);
