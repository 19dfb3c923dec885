// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/ep_topk_cpu.h: what every CPU kernel on top-k ids under expert parallelism does with a row.
#pragma once

#include "sgl_moe_jit/moe/ep_topk_params.h"

namespace sgl_moe_jit {
namespace moe {

template <typename Id>
bool is_live(const EpTopkParams& p, int64_t row) {
  if (row >= num_valid_rows(p)) return false;
  const Id* ids = static_cast<const Id*>(p.topk_ids) + row * p.top_k;
  bool live = false;
  for (int k = 0; k < p.top_k; ++k) live |= ids[k] >= 0;
  return live;
}

// Writes a row of the outputs; its shared columns go to a rank, if the row is live.
template <typename Id, typename Weight>
void write_row(const EpTopkParams& p, int64_t row, int32_t rank) {
  const Id* ids = static_cast<const Id*>(p.topk_ids) + row * p.top_k;
  const Weight* weights = static_cast<const Weight*>(p.topk_weights) + row * p.top_k;
  Id* out_ids = static_cast<Id*>(p.out_ids) + row * (p.top_k + p.num_shared);
  Weight* out_weights = static_cast<Weight*>(p.out_weights) + row * (p.top_k + p.num_shared);
  const bool valid = row < num_valid_rows(p), live = is_live<Id>(p, row);
  for (int k = 0; k < p.top_k; ++k) {
    out_ids[k] = valid ? sent_id(p, ids[k]) : Id{-1};
    out_weights[k] = valid && ids[k] >= 0 ? weights[k] : Weight{0};
  }
  for (int s = 0; s < p.num_shared; ++s) {
    out_ids[p.top_k + s] = live ? static_cast<Id>(shared_slot(p, rank) + s) : Id{-1};
    out_weights[p.top_k + s] = live ? static_cast<Weight>(p.shared_weight) : Weight{0};
  }
}

// Adds the ids >= 0 of each owner to counts [W]; returns the live rows.
template <typename Id>
int64_t count_pairs(const EpTopkParams& p, int64_t* counts) {
  int64_t live = 0;
  for (int64_t row = 0; row < num_valid_rows(p); ++row) {
    const Id* ids = static_cast<const Id*>(p.topk_ids) + row * p.top_k;
    for (int k = 0; k < p.top_k; ++k) {
      if (ids[k] >= 0) ++counts[owner_of(p, ids[k])];
    }
    live += is_live<Id>(p, row);
  }
  return live;
}

}  // namespace moe
}  // namespace sgl_moe_jit
