// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_binding.cc: the TVM-FFI door of the CUDA finalize: validate, guard, stream, launch.
//
// The build passes SMJ_ACTIVATION_DTYPE and SMJ_WEIGHT_DTYPE, members of host::DType, SMJ_TOP_K and
// SMJ_GATE.
#include <tvm/ffi/function.h>

#include <atomic>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/finalize_checks.h"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::DType;
using host::Optional;
using host::TensorView;

// Devices that this module's code is for, and whether they have PDL; a bit each.
std::atomic<uint64_t> served{0}, served_with_pdl{0};

void serve_device(int64_t device, bool supports_pdl) {
  TVM_FFI_ICHECK(device >= 0 && device < 64) << "device: expected 0 to 63, got " << device;
  if (supports_pdl) served_with_pdl |= uint64_t{1} << device;
  served |= uint64_t{1} << device;
}

bool has_bit(const std::atomic<uint64_t>& bits, DLDevice device) {
  return device.device_type == kDLCUDA && device.device_id >= 0 && device.device_id < 64 &&
         (bits.load(std::memory_order_relaxed) >> device.device_id & 1) != 0;
}

// Whether this module is the one for a call. The caller may guess and ask, which costs it less than
// to look at the tensors itself.
bool is_for(const moe::FinalizeInputs& in, int64_t top_k) {
  const DType weight =
      in.weights.has_value() ? host::dtype_of(in.weights.value().dtype()) : DType::kNone;
  return host::dtype_of(in.gemm2_out.dtype()) == DType::SMJ_ACTIVATION_DTYPE &&
         weight == DType::SMJ_WEIGHT_DTYPE && (SMJ_TOP_K == 0 || SMJ_TOP_K == top_k) &&
         in.gate_logits.has_value() == (SMJ_GATE != 0) && has_bit(served, in.gemm2_out.device());
}

enum Flags : int64_t { kPdl = 1, kVector = 2 };

void launch(const moe::FinalizeCall& call, DLDevice device, int64_t flags) {
  if (call.params.num_tokens == 0) return;
  host::DeviceGuard guard(device.device_id);
  const bool pdl = (flags & kPdl) != 0 && has_bit(served_with_pdl, device);
  host::check_cuda(moe::launch_finalize(call.params, device.device_id, pdl, (flags & kVector) != 0,
                                        host::current_stream(device)),
                   "moe_finalize_fuse_shared");
}

// Returns false, and does nothing, when another module is the one for the call.
bool moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of,
                  Optional<TensorView> weights, Optional<TensorView> shared,
                  Optional<TensorView> gate_logits, int64_t top_k, double routed_factor,
                  int64_t flags) {
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  if (!is_for(in, top_k)) return false;
  launch(moe::check_finalize(out, in, top_k, routed_factor), gemm2_out.device(), flags);
  return true;
}

// The same into a tensor of its own from the caller's allocator, which is cheaper to reach from
// here than from Python. None when another module is the one for the call.
Optional<host::Tensor> moe_finalize_new(TensorView gemm2_out, TensorView row_of,
                                        Optional<TensorView> weights, Optional<TensorView> shared,
                                        Optional<TensorView> gate_logits, int64_t top_k,
                                        double routed_factor, Optional<int64_t> hidden_dim,
                                        int64_t flags) {
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  if (!is_for(in, top_k)) return std::nullopt;
  moe::FinalizeCall call = moe::check_finalize_inputs(in, moe::output_width(in, hidden_dim),
                                                      moe::width_name(in), top_k, routed_factor);
  moe::FinalizeParams& p = call.params;
  host::Tensor out = host::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {p.num_tokens, p.hidden_dim},
                                                gemm2_out.dtype(), gemm2_out.device());
  p.out = out.data_ptr();
  p.out_stride = p.hidden_dim;
  launch(call, gemm2_out.device(), flags);
  return out;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(serve_device, serve_device);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize_new, moe_finalize_new);
