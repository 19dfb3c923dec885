// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/cuda_call.h: the device guard, the caller's stream, and launch errors, for CUDA bindings.
#pragma once

#include <cuda_runtime_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace sgl_moe_jit {
namespace host {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status) << ": "
                                << cudaGetErrorString(status);
  }
}

// Makes a device current for a scope and gives the caller's device back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    changed_ = previous_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// The stream torch has current on this device; tvm-ffi sets it from the call's first CUDA tensor.
inline cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline void check_is_cuda(const char* name, const TensorView& x) {
  SMJ_CHECK_VALUE(x.device().device_type == kDLCUDA)
      << name << ": expected a CUDA tensor, got device " << device_text(x.device());
}

}  // namespace host
}  // namespace sgl_moe_jit
