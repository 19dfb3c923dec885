// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_quick.h: the arguments of the extension's finalize with residual and RMSNorm.
#pragma once

#include "sgl_moe_jit/host/quick_tensors.h"
#include "sgl_moe_jit/moe/finalize_norm_checks.h"

namespace sgl_moe_jit {
namespace moe {

// By the parameters of the quick ways in ops/finalize_norm.py, in their order.
template <bool kFp8>
class QuickFinalizeNorm {
 public:
  explicit QuickFinalizeNorm(host::QuickCall* call)
      : gemm2_out(host::quick_tensor(*call, 0)),
        row_of(host::quick_tensor(*call, 1)),
        weights(host::quick_optional(*call, 2)),
        shared(host::quick_optional(*call, 3)),
        gate_logits(host::quick_optional(*call, 4)),
        residual(host::quick_tensor(*call, 5)),
        weight(host::quick_tensor(*call, 6)),
        top_k(call->values[7].integer),
        eps(call->values[8].real),  // 9 is enable_pdl, which stands in the flags
        factor(call->values[10].real),
        call_(call) {}

  // Makes the outputs that were not given, and checks everything.
  FinalizeNormCall check() const {
    host::check_rows("residual", residual);
    constexpr DLDataType kScale{kDLFloat, 32, 1}, kFp8Type{kDLFloat8_e4m3fn, 8, 1};
    const int64_t width = residual.size(1);
    const host::TensorView out = output(0, width, kFp8 ? kFp8Type : residual.dtype());
    host::Optional<host::TensorView> scale;
    if (kFp8) scale = output(1, 1, kScale);
    const host::TensorView sum = output(kFp8 ? 2 : 1, width, residual.dtype());
    return check_finalize_norm({out, sum, scale}, {gemm2_out, row_of, weights, shared, gate_logits},
                               {residual, weight}, top_k, factor, eps);
  }

  host::TensorView gemm2_out, row_of;
  host::Optional<host::TensorView> weights, shared, gate_logits;
  host::TensorView residual, weight;
  int64_t top_k;
  double eps, factor;

 private:
  host::TensorView output(int number, int64_t width, DLDataType dtype) const {
    constexpr int kFirst = 11;
    if (call_->has(kFirst + number)) return host::quick_tensor(*call_, kFirst + number);
    return host::quick_make(call_, number, {residual.size(0), width}, dtype, residual.device());
  }

  host::QuickCall* call_;
};

}  // namespace moe
}  // namespace sgl_moe_jit
