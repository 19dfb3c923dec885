// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/launch.cuh: one way to launch a kernel, with or without programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

namespace sgl_moe_jit {
namespace host {

// Returns this launch's own status: an error somebody else left behind is neither reported nor
// cleared.
template <typename... KernelArgs, typename... Args>
cudaError_t launch_kernel(void (*kernel)(KernelArgs...), dim3 grid, unsigned threads,
                          bool enable_pdl, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = enable_pdl ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Multiprocessors of the current device, asked for once a device; 0 when the driver does not say.
inline int sm_count() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices] = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return 0;
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0 &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace host
}  // namespace sgl_moe_jit
