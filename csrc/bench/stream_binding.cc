// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/stream_binding.cc: the TVM-FFI door of the streaming kernel.
#include <tvm/ffi/function.h>

#include "bench/stream_launch.h"
#include "sgl_moe_jit/host/cuda_call.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace bench = sgl_moe_jit::bench;
using host::TensorView;

void check(const char* name, const TensorView& x, int64_t numel) {
  host::check_is_cuda(name, x);
  SMJ_CHECK_TYPE(host::dtype_of(x.dtype()) == host::DType::kBFloat16)
      << name << ": expected bfloat16, got " << host::dtype_name(x.dtype());
  host::check_contiguous(name, x);
  SMJ_CHECK_VALUE(x.numel() == numel && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0)
      << name << ": expected " << numel << " values from a multiple of 16 bytes on, got "
      << host::shape_text(x);
}

void stream(TensorView out, TensorView rows, TensorView shared, bool deep, int64_t threads,
            int64_t blocks) {
  const int64_t numel = out.numel();
  SMJ_CHECK_VALUE(numel > 0 && numel % 8 == 0)
      << "out: expected a multiple of 8 values, got " << host::shape_text(out);
  check("out", out, numel);
  check("rows", rows, numel * SMJ_TOP_K);
  check("shared", shared, numel);
  bench::StreamParams p;
  p.out = static_cast<__nv_bfloat16*>(out.data_ptr());
  p.rows = static_cast<const __nv_bfloat16*>(rows.data_ptr());
  p.shared = static_cast<const __nv_bfloat16*>(shared.data_ptr());
  p.num_vectors = numel / 8;
  host::DeviceGuard guard(out.device().device_id);
  host::check_cuda(
      bench::launch_stream(p, deep, static_cast<int>(threads), static_cast<int>(blocks),
                           host::current_stream(out.device())),
      "stream");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(stream, stream);
