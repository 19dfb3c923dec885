// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// device/vector.cuh: several neighbouring bfloat16 or float values moved as one access of 2 to 16
// bytes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

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

// kSize values of T, loaded and stored whole; the address must be a multiple of the whole size.
// They stay packed until one is asked for: taken apart at once, bfloat16 values would fill a
// register each, twice what they need.
template <typename T, int kSize>
struct Vector {
  using Raw = typename Word<sizeof(T) * kSize>::type;
  Raw raw;

  __device__ __forceinline__ T get(int i) const { return reinterpret_cast<const T*>(&raw)[i]; }
  __device__ __forceinline__ void set(int i, T value) { reinterpret_cast<T*>(&raw)[i] = value; }
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

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
// Round to nearest even, subnormals kept.
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

}  // namespace device
}  // namespace sgl_moe_jit
