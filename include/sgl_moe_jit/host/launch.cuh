// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// host/launch.cuh: one way to launch a kernel, with or without programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
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

// Multiprocessors of a device, asked for once; 0 when the driver does not say.
inline int sm_count(int device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices] = {};
  if (device < 0 || device >= kMaxDevices) return 0;
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0 &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

inline int sm_count() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? sm_count(device) : 0;
}

// Registers a thread of a kernel takes; 0 when the driver does not say.
inline int registers_of(const void* kernel, std::atomic<int>& known) {
  int registers = known.load(std::memory_order_relaxed);
  cudaFuncAttributes attributes;
  if (registers == 0 && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) {
    registers = attributes.numRegs;
    known.store(registers, std::memory_order_relaxed);
  }
  return registers;
}

// Blocks of so many threads that a multiprocessor holds of a kernel without shared memory: what
// cudaOccupancyMaxActiveBlocksPerMultiprocessor says, without its microsecond. 64 K registers, 2048
// threads and 32 blocks a multiprocessor on sm_80, sm_90 and sm_100 (sm_120: 1536 threads, which
// makes this an upper bound); registers go to warps in units of 256.
inline int blocks_a_sm(int registers, int threads) {
  const int warps = threads / 32, a_warp = (registers * 32 + 255) / 256 * 256;
  const int by_registers = registers > 0 ? 65536 / a_warp / warps : 32;
  return std::min({32, 2048 / threads, by_registers});
}

}  // namespace host
}  // namespace sgl_moe_jit
