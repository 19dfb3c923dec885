// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// device/pdl.cuh: programmatic dependent launch, as two calls that do nothing below sm_90.
//
// Both are also harmless in a kernel launched without the attribute.
#pragma once

namespace sgl_moe_jit {
namespace device {

// Returns once every kernel ahead in the stream has finished and its writes are visible. Nothing a
// predecessor may write, indices included, may be read before it, and nothing it may read be
// written.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start once every block of this grid has called it or exited. It
// orders no memory: a consumer launched with the attribute must itself wait.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace device
}  // namespace sgl_moe_jit
