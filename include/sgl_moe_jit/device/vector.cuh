// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// device/vector.cuh: several neighbouring activations moved as one access of 2 to 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace sgl_moe_jit {
namespace device {

template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// kSize values of T, loaded and stored whole; the address must be a multiple of the whole size.
// They stay packed until one is asked for: taken apart at once, bfloat16 values would fill a
// register each, twice what they need.
template <typename T, int kSize>
struct Vector {
  using Raw = typename Word<sizeof(T) * kSize>::type;
  Raw raw;

  __device__ __forceinline__ T get(int i) const { return reinterpret_cast<const T*>(&raw)[i]; }
  __device__ __forceinline__ void set(int i, T value) { reinterpret_cast<T*>(&raw)[i] = value; }

  // Value i in float32.
  __device__ __forceinline__ float as_float(int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kSize % 2 == 0) {
      // One instruction each; a conversion of the upper half of a word takes two.
      const uint32_t pair = reinterpret_cast<const uint32_t*>(&raw)[i / 2];
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      return to_float(get(i));
    }
  }
};

// Plain ld.global, not ld.global.nc: a predecessor in the stream may have written what is read
// here.
template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> load(const T* p) {
  return {*reinterpret_cast<const typename Vector<T, kSize>::Raw*>(p)};
}

template <typename T, int kSize>
__device__ __forceinline__ void store(T* p, const Vector<T, kSize>& v) {
  *reinterpret_cast<typename Vector<T, kSize>::Raw*>(p) = v.raw;
}

// Loads a vector from base + row * stride_bytes if row is not negative, and leaves v alone
// otherwise. In assembly because this address stands between an index and its row: one wide
// multiply-add (which ptxas makes of these two; of mad.wide it makes three) and a predicated load,
// where the compiler makes eight instructions of the C++.
template <typename T, int kSize>
__device__ __forceinline__ void load_row(Vector<T, kSize>& v, const void* base, int32_t row,
                                         uint32_t stride_bytes) {
  constexpr int kBytes = sizeof(T) * kSize;
  if constexpr (kBytes == 16) {
    asm volatile(
        "{ .reg .pred p; .reg .u64 a; mul.wide.u32 a, %4, %5; add.u64 a, a, %6; setp.ge.s32 p, %4, "
        "0;"
        " @p ld.global.v4.u32 {%0, %1, %2, %3}, [a]; }"
        : "+r"(v.raw.x), "+r"(v.raw.y), "+r"(v.raw.z), "+r"(v.raw.w)
        : "r"(row), "r"(stride_bytes), "l"(base)
        : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{ .reg .pred p; .reg .u64 a; mul.wide.u32 a, %2, %3; add.u64 a, a, %4; setp.ge.s32 p, %2, "
        "0;"
        " @p ld.global.v2.u32 {%0, %1}, [a]; }"
        : "+r"(v.raw.x), "+r"(v.raw.y)
        : "r"(row), "r"(stride_bytes), "l"(base)
        : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile(
        "{ .reg .pred p; .reg .u64 a; mad.wide.u32 a, %1, %2, %3; setp.ge.s32 p, %1, 0;"
        " @p ld.global.u32 %0, [a]; }"
        : "+r"(v.raw)
        : "r"(row), "r"(stride_bytes), "l"(base)
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; .reg .u64 a; mul.wide.u32 a, %1, %2; add.u64 a, a, %3; setp.ge.s32 p, %1, "
        "0;"
        " @p ld.global.u16 %0, [a]; }"
        : "+h"(v.raw)
        : "r"(row), "r"(stride_bytes), "l"(base)
        : "memory");
  }
}

// Asks for a line of L2 without reading it: L2 is where all writes meet, so that this is right even
// before a predecessor has written the line.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// All round to nearest even and keep subnormals.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// from_float of neighbours; two halves of a word are converted and packed by one instruction.
template <typename T, int kSize>
__device__ __forceinline__ Vector<T, kSize> pack(const float (&values)[kSize]) {
  Vector<T, kSize> v;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      reinterpret_cast<__nv_bfloat162*>(&v.raw)[i / 2] =
          __floats2bfloat162_rn(values[i], values[i + 1]);
    }
  } else if constexpr (std::is_same_v<T, __half> && kSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      reinterpret_cast<__half2*>(&v.raw)[i / 2] = __floats2half2_rn(values[i], values[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v.set(i, from_float<T>(values[i]));
  }
  return v;
}

}  // namespace device
}  // namespace sgl_moe_jit
