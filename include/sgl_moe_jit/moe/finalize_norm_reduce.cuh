// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_norm_reduce.cuh: one value a row out of all its columns, by the tree that
// finalize_norm_params.h defines. Device code only.
//
// A thread adds the leaves of its columns, a warp its threads' by a butterfly, which is that tree
// because neighbours lie in neighbouring lanes; each warp's value goes to a slot, in the order of
// its columns, and after one barrier every warp adds all slots in the same way.
#pragma once

#include "sgl_moe_jit/device/cluster.cuh"
#include "sgl_moe_jit/moe/finalize_norm_params.h"

namespace sgl_moe_jit {
namespace moe {

// A warp has at least 32 leaves, 192 warps the widest row; parts of it that end in the middle of a
// warp add one each, 16 at most.
constexpr int kMaxSlots = kMaxNormHidden / (32 * kNormLeaf) + 16;

// The sum of a thread's leaves. kColumns is 4 or 8.
template <int kColumns>
__device__ __forceinline__ float sum_of_squares(const float (&s)[kColumns]) {
  static_assert(kColumns == kNormLeaf || kColumns == 2 * kNormLeaf, "one leaf or two neighbours");
  float leaf[kColumns / kNormLeaf];
#pragma unroll
  for (int l = 0; l < kColumns / kNormLeaf; ++l) {
    leaf[l] = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormLeaf; ++i) {
      leaf[l] = __fmaf_rn(s[l * kNormLeaf + i], s[l * kNormLeaf + i], leaf[l]);
    }
  }
  return kColumns == kNormLeaf ? leaf[0] : __fadd_rn(leaf[0], leaf[kColumns / kNormLeaf - 1]);
}

// Every lane gets the tree's sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}

// The largest magnitude; NaN does not count.
template <int kColumns>
__device__ __forceinline__ float largest(const float (&n)[kColumns]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) most = fmaxf(most, fabsf(n[i]));
  return most;
}

// The largest of values >= 0, by their bits.
__device__ __forceinline__ float warp_max(float x) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}

// The sum of all slots; kColumns as in sum_of_squares.
template <int kColumns>
__device__ __forceinline__ float total_of(const float* slots, int num_slots) {
  constexpr int kSlotsABlock = kNormBlock / (32 * kColumns);
  static_assert(kSlotsABlock == 32 || kSlotsABlock == 64, "one slot a lane, or two neighbours");
  const int lane = threadIdx.x % 32;
  float total = 0.0f;
#pragma unroll 1
  for (int first = 0; first < num_slots; first += kSlotsABlock) {
    const int slot = first + lane * (kSlotsABlock / 32);
    float x = slot < num_slots ? slots[slot] : 0.0f;
    if constexpr (kSlotsABlock == 64) {
      x = __fadd_rn(x, slot + 1 < num_slots ? slots[slot + 1] : 0.0f);
    }
    total = __fadd_rn(total, warp_sum(x));
  }
  return total;
}

__device__ __forceinline__ float largest_of(const float* slots, int num_slots) {
  float largest = 0.0f;
  for (int slot = threadIdx.x % 32; slot < num_slots; slot += 32) {
    largest = fmaxf(largest, slots[slot]);
  }
  return warp_max(largest);
}

// How warps hand their values to each other. Of a token each has two: a sum, then a maximum.
struct SlotMemory {
  float slots[2][kMaxSlots];
  uint64_t arrived[2];
};

// One block a token.
class BlockExchange {
 public:
  __device__ __forceinline__ explicit BlockExchange(SlotMemory& memory) : memory_(memory) {}
  __device__ __forceinline__ static int rank() { return 0; }
  __device__ __forceinline__ static int size() { return 1; }
  __device__ __forceinline__ void begin(int, int) {}
  __device__ __forceinline__ void put(int which, int slot, float value) {
    if (threadIdx.x % 32 == 0) memory_.slots[which][slot] = value;
  }
  __device__ __forceinline__ const float* wait(int which) {
    __syncthreads();
    return memory_.slots[which];
  }

 private:
  SlotMemory& memory_;
};

// A cluster of 2 to 32 blocks a token; each gets every value.
class ClusterExchange {
 public:
  __device__ __forceinline__ explicit ClusterExchange(SlotMemory& memory) : memory_(memory) {}
  __device__ __forceinline__ static int rank() { return device::cluster_rank(); }
  __device__ __forceinline__ static int size() { return device::cluster_size(); }

  // Before anything else, and before the wait for predecessors: here it costs no time. num_slots is
  // the number of values that will come, num_values how often.
  __device__ __forceinline__ void begin(int num_slots, int num_values) {
    if (threadIdx.x == 0) {
      for (int which = 0; which < num_values; ++which) {
        device::init_barrier(&memory_.arrived[which]);
      }
    }
    __syncwarp();
    device::cluster_arrive();
    device::cluster_wait();  // a block's shared memory can be written once the block runs
    if (threadIdx.x == 0) {
      for (int which = 0; which < num_values; ++which) {
        device::expect_messages(&memory_.arrived[which], num_slots * sizeof(float));
      }
    }
  }

  // Lane r sends to the block of rank r.
  __device__ __forceinline__ void put(int which, int slot, float value) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < device::cluster_size()) {
      const uint32_t here = device::shared_address(&memory_.slots[which][slot]);
      const uint32_t barrier = device::shared_address(&memory_.arrived[which]);
      device::send_message(device::address_in_block(here, lane),
                           device::address_in_block(barrier, lane), value);
    }
  }
  __device__ __forceinline__ const float* wait(int which) {
    device::wait_for_messages(&memory_.arrived[which]);
    return memory_.slots[which];
  }

 private:
  SlotMemory& memory_;
};

}  // namespace moe
}  // namespace sgl_moe_jit
