// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// pdl_producer.cuh: a predecessor that lets its dependent start at once and writes late, and a
// consumer that waits. What a kernel reads before its PDL wait is the producer's old data, every
// time.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/host/launch.cuh"

namespace pdl_test {

using sgl_moe_jit::host::TensorView;

// By one block, which leaves the rest of the chip to the kernel under test. Whole tensors are
// aligned to 16 bytes.
__device__ __forceinline__ void copy(unsigned char* target, const unsigned char* source,
                                     int64_t bytes) {
  const int64_t words = bytes / 16;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) {
    reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
  }
  for (int64_t i = words * 16 + threadIdx.x; i < bytes; i += blockDim.x) target[i] = source[i];
}

// Copies bytes from source to target, 200 us after its dependents were let go.
__global__ void late_copy(unsigned char* target, const unsigned char* source, int64_t bytes) {
  sgl_moe_jit::device::pdl_wait();
  sgl_moe_jit::device::pdl_launch_dependents();
#if __CUDA_ARCH__ >= 700
  for (int i = 0; i < 4; ++i) __nanosleep(50000);
#endif
  copy(target, source, bytes);
}

__global__ void copy_after_wait(unsigned char* target, const unsigned char* source, int64_t bytes) {
  sgl_moe_jit::device::pdl_wait();
  copy(target, source, bytes);
}

template <typename Kernel>
void launch(Kernel kernel, TensorView target, TensorView source) {
  namespace host = sgl_moe_jit::host;
  host::DeviceGuard guard(target.device().device_id);
  const int64_t bytes = target.numel() * (target.dtype().bits / 8);
  host::check_cuda(
      host::launch_kernel(kernel, dim3(1), 256, true, host::current_stream(target.device()),
                          static_cast<unsigned char*>(target.data_ptr()),
                          static_cast<const unsigned char*>(source.data_ptr()), bytes),
      "pdl_test");
}

inline void produce_late(TensorView target, TensorView source) {
  launch(late_copy, target, source);
}
inline void consume(TensorView target, TensorView source) {
  launch(copy_after_wait, target, source);
}

}  // namespace pdl_test
