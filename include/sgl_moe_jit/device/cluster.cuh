// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// device/cluster.cuh: blocks of a cluster and messages through their shared memory; sm_90 and up.
// Below that a call does nothing, and a block counts as a cluster of its own.
//
// A message is a float stored in another block's shared memory and counted, by its bytes, on a
// barrier there. Its receiver waits for that barrier alone; barrier.cluster would also wait for the
// sender's other writes to be visible.
#pragma once

#include <cstdint>

namespace sgl_moe_jit {
namespace device {

// This block's place in its cluster, and the cluster's size.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}
// Every thread of every block must make both calls, in this order. They order no memory but what
// init_barrier wrote, which all see after the second.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where what lies at address in this block's shared memory lies in the block of that rank.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

// Makes barrier ready for use. For one thread of a block; others may send after cluster_arrive and
// cluster_wait.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
      : "memory");
#endif
}

// Has barrier open once so many bytes of messages are here; some may have come before. For the
// thread that made it ready, after cluster_wait: compute-sanitizer sees no order without it.
__device__ __forceinline__ void expect_messages(uint64_t* barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Both addresses from address_in_block, of the same block.
__device__ __forceinline__ void send_message(uint32_t address, uint32_t barrier, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
#endif
}

// Returns when all that barrier expects is here, and visible.
__device__ __forceinline__ void wait_for_messages(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t here = 0;
  while (here == 0) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(here)
        : "r"(shared_address(barrier))
        : "memory");
  }
#endif
}

}  // namespace device
}  // namespace sgl_moe_jit
