// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation.cuh: out = silu(gate) * up, one pass. Device code only.
//
// Cost, N rows of width I, A bytes an element: bytes = 3 A N I, about 30 operations an element: at
// 5 bytes an element or more the memory is the wall, and the 6 of the 16-bit types come close to
// it.
#pragma once

#include <cutlass/arch/memory.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include "sgl_moe_jit/device/pdl.cuh"
#include "sgl_moe_jit/moe/activation_math.h"
#include "sgl_moe_jit/moe/activation_params.h"

namespace sgl_moe_jit {
namespace moe {

// Not swept: 403 MB took 103 us in a layer of 4096 tokens, 3.9 TB/s (H200, 2026-11-30, profiler).
constexpr int kActivationThreads = 128;

// A row (blockIdx.x) and kActivationThreads stretches of kVec of its columns (blockIdx.y). kVec = 1
// has no alignment demands and the same bits. Element: cutlass::bfloat16_t, cutlass::half_t or
// float.
template <typename Element, int kVec>
__global__ void __launch_bounds__(kActivationThreads)
    silu_and_mul_kernel(const ActivationParams p) {
  using Loaded = cutlass::AlignedArray<Element, kVec>;
  const cutlass::NumericArrayConverter<float, Element, kVec> to_float;
  const cutlass::NumericArrayConverter<Element, float, kVec> from_float;
  const int64_t row = blockIdx.x;
  const int64_t column = (blockIdx.y * int64_t{kActivationThreads} + threadIdx.x) * kVec;
  const Element* gate = static_cast<const Element*>(p.x) + row * p.x_stride + column;
  device::pdl_wait();
  device::pdl_launch_dependents();
  if (column >= p.width) return;
  const Loaded gate_raw = *reinterpret_cast<const Loaded*>(gate);
  const Loaded up_raw = *reinterpret_cast<const Loaded*>(gate + p.width);
  const cutlass::Array<float, kVec> g = to_float(gate_raw), u = to_float(up_raw);
  cutlass::Array<float, kVec> result;
#pragma unroll
  for (int i = 0; i < kVec; ++i) result[i] = math::silu_and_mul(g[i], u[i]);
  Loaded packed;
  static_cast<cutlass::Array<Element, kVec>&>(packed) = from_float(result);
  // Not an assignment: nvcc takes that apart into words of 4 bytes.
  cutlass::arch::global_store<Loaded, sizeof(Loaded)>(
      packed, static_cast<Element*>(p.out) + row * p.width + column, true);
}

}  // namespace moe
}  // namespace sgl_moe_jit
