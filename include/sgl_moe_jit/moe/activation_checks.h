// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation_checks.h: from the caller's tensors to ActivationParams, or a clear error.
#pragma once

#include <limits>

#include "sgl_moe_jit/moe/activation_params.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace moe {

inline void check_activation_input(const host::TensorView& x) {
  const host::DType dtype = host::dtype_of(x.dtype());
  SMJ_CHECK_TYPE(host::is_float(dtype))
      << "x: expected bfloat16, float16 or float32, got " << host::dtype_name(x.dtype());
  host::check_rows("x", x);
  SMJ_CHECK_VALUE(x.size(1) % 2 == 0)
      << "x: expected an even width (gate, then up), got shape " << host::shape_text(x);
  SMJ_CHECK_VALUE(x.size(0) <= std::numeric_limits<int32_t>::max())
      << "x: expected fewer than 2^31 rows, got " << x.size(0);
  // A launch's second grid dimension ends at 65535, of 128 columns each on the scalar path.
  SMJ_CHECK_VALUE(x.size(1) / 2 <= 65535 * int64_t{128})
      << "x: expected at most " << 2 * 65535 * 128 << " columns, got " << x.size(1);
}

// out is this library's own allocation.
inline ActivationParams check_activation_call(const host::TensorView& out,
                                              const host::TensorView& x) {
  check_activation_input(x);
  TVM_FFI_ICHECK(host::is_contiguous(out) && 2 * out.numel() == x.numel() &&
                 host::dtype_of(out.dtype()) == host::dtype_of(x.dtype()));
  return ActivationParams{out.data_ptr(), x.data_ptr(), host::row_stride(x), x.size(0),
                          x.size(1) / 2};
}

}  // namespace moe
}  // namespace sgl_moe_jit
