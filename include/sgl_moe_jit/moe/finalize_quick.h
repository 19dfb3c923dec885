// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_quick.h: the arguments of the extension's finalize call.
#pragma once

#include "sgl_moe_jit/host/quick_tensors.h"
#include "sgl_moe_jit/moe/finalize_checks.h"

namespace sgl_moe_jit {
namespace moe {

// By the parameters of _quick_in_python in ops/finalize.py, in their order.
struct QuickFinalize {
  host::TensorView gemm2_out, row_of;
  host::Optional<host::TensorView> weights, shared, gate_logits, out;
  int64_t top_k;
  double factor;
  host::Optional<int64_t> hidden_dim;

  explicit QuickFinalize(const host::QuickCall& call)
      : gemm2_out(host::quick_tensor(call, 0)),
        row_of(host::quick_tensor(call, 1)),
        weights(host::quick_optional(call, 2)),
        shared(host::quick_optional(call, 3)),
        gate_logits(host::quick_optional(call, 4)),
        out(host::quick_optional(call, 9)),
        top_k(call.values[5].integer),  // 6 is enable_pdl, which stands in the flags
        factor(call.values[7].real),
        hidden_dim(host::quick_optional_int(call, 8)) {}

  FinalizeInputs inputs() const { return {gemm2_out, row_of, weights, shared, gate_logits}; }

  // Whether a given output's width is H. Only a shared row tells it to the checks that follow; the
  // long way compares hidden_dim.
  bool fits_out() const {
    if (hidden_dim.has_value()) return false;
    const host::TensorView& to = out.value();
    return shared.has_value() ||
           (to.ndim() == 2 && gemm2_out.ndim() == 2 && to.size(1) == gemm2_out.size(1));
  }

  void* make_out(host::QuickCall* call, const FinalizeParams& p) const {
    return host::quick_make(call, 0, {p.num_tokens, p.hidden_dim}, gemm2_out.dtype(),
                            gemm2_out.device())
        .data_ptr();
  }
};

}  // namespace moe
}  // namespace sgl_moe_jit
