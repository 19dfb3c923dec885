// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_binding.cc: the TVM-FFI door of the CUDA finalize: validate, guard, stream, launch.
//
// The build passes SMJ_ACTIVATION_DTYPE and SMJ_WEIGHT_DTYPE, members of host::DType, SMJ_TOP_K and
// SMJ_GATE.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/host/served_devices.h"
#include "sgl_moe_jit/moe/finalize_checks.h"
#include "sgl_moe_jit/moe/finalize_launch.h"
#include "sgl_moe_jit/moe/finalize_quick.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::Optional;
using host::TensorView;

host::ServedDevices served;

void serve_device(int64_t device, bool supports_pdl) { served.add(device, supports_pdl); }

// Whether this module is the one for a call. The caller may guess and ask, which costs it less than
// to look at the tensors itself.
bool is_for(const moe::FinalizeInputs& in, int64_t top_k) {
  const DType weight =
      in.weights.has_value() ? host::dtype_of(in.weights.value().dtype()) : DType::kNone;
  return host::dtype_of(in.gemm2_out.dtype()) == DType::SMJ_ACTIVATION_DTYPE &&
         weight == DType::SMJ_WEIGHT_DTYPE && (SMJ_TOP_K == 0 || SMJ_TOP_K == top_k) &&
         in.gate_logits.has_value() == (SMJ_GATE != 0) && served.has(in.gemm2_out.device());
}

enum Flags : int64_t { kPdl = 1, kVector = 2 };

void launch(const moe::FinalizeCall& call, DLDevice device, int64_t flags, cudaStream_t stream) {
  if (call.params.num_tokens == 0) return;
  host::DeviceGuard guard(device.device_id);
  const bool pdl = (flags & kPdl) != 0 && served.has_pdl(device);
  host::check_cuda(
      moe::launch_finalize(call.params, device.device_id, pdl, (flags & kVector) != 0, stream),
      "moe_finalize_fuse_shared");
}

// Returns false, and does nothing, when another module is the one for the call.
bool moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of,
                  Optional<TensorView> weights, Optional<TensorView> shared,
                  Optional<TensorView> gate_logits, int64_t top_k, double routed_factor,
                  int64_t flags) {
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  if (!is_for(in, top_k)) return false;
  const DLDevice device = gemm2_out.device();
  launch(moe::check_finalize(out, in, top_k, routed_factor), device, flags,
         host::current_stream(device));
  return true;
}

// For an output of its own, in rows side by side.
moe::FinalizeCall check_new(const moe::FinalizeInputs& in, const Optional<int64_t>& hidden_dim,
                            int64_t top_k, double routed_factor) {
  moe::FinalizeCall call = moe::check_finalize_inputs(in, moe::output_width(in, hidden_dim),
                                                      moe::width_name(in), top_k, routed_factor);
  call.params.out_stride = call.params.hidden_dim;
  return call;
}

// Before there is an output of its own.
void check(TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
           Optional<TensorView> shared, Optional<TensorView> gate_logits, int64_t top_k,
           double routed_factor, Optional<int64_t> hidden_dim) {
  check_new({gemm2_out, row_of, weights, shared, gate_logits}, hidden_dim, top_k, routed_factor);
}

// The extension's call: into a given output or a new one.
bool quick_finalize(host::QuickCall* quick) noexcept {
  return host::quick_answer([quick] {
    const moe::QuickFinalize x(*quick);
    if (!is_for(x.inputs(), x.top_k)) return false;
    moe::FinalizeCall call;
    if (x.out.has_value()) {
      if (!x.fits_out()) return false;
      call = moe::check_finalize(x.out.value(), x.inputs(), x.top_k, x.factor);
    } else {
      call = check_new(x.inputs(), x.hidden_dim, x.top_k, x.factor);
      call.params.out = x.make_out(quick, call.params);
    }
    launch(call, x.gemm2_out.device(), quick->flags, static_cast<cudaStream_t>(quick->stream));
    return true;
  });
}

int64_t quick_address() { return host::address_of(quick_finalize); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(serve_device, serve_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_address, quick_address);
