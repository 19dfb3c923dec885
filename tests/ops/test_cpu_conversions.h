// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// test_cpu_conversions.h: narrow floats to float32 and back, by each way that CPU kernels take.
#pragma once

#include "sgl_moe_jit/host/cpu_kernel.h"
#include "sgl_moe_jit/host/cpu_vectors.h"
#include "sgl_moe_jit/tvm_ffi_utils.h"

namespace conversions_test {

namespace host = sgl_moe_jit::host;
using host::TensorView;

// 0 to 2: one value after another, compiled for that host::CpuIsa. 3 to 5: registers; 5 streams.
enum Way : int64_t { kAvx2Registers = 3, kAvx512Registers = 4, kStreamed = 5 };

inline bool has(int64_t way) {
  host::CpuIsa unused;
  const bool wide = way == kAvx512Registers || way == kStreamed;
  return host::resolve_cpu_isa(way < kAvx2Registers ? way : wide ? 2 : 1, &unused);
}

template <typename T>
struct Widen {
  static SMJ_INLINE void run(float* out, const T* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = host::to_float(x[i]);
  }
};
template <typename T>
struct Narrow {
  static SMJ_INLINE void run(T* out, const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) host::store(out + i, x[i]);
  }
};

#ifdef SMJ_X86
template <typename To, typename From>
SMJ_AVX2 void convert8(To* out, const From* x, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) host::store8(out + i, host::load8(x + i), false);
}
template <typename To, typename From>
SMJ_AVX512 void convert16(To* out, const From* x, int64_t count, bool stream) {
  for (int64_t i = 0; i < count; i += 16) host::store16(out + i, host::load16(x + i), stream);
  if (stream) _mm_sfence();
}
#endif

template <template <typename> class Body, typename T, typename To, typename From>
void convert(To* out, const From* x, int64_t count, int64_t way) {
#ifdef SMJ_X86
  if (way == kAvx2Registers) return convert8(out, x, count);
  if (way >= kAvx512Registers) return convert16(out, x, count, way == kStreamed);
#endif
  host::run_for_isa<Body<T>>(static_cast<host::CpuIsa>(way), out, x, count);
}

template <typename T>
void widen_as(TensorView out, TensorView x, int64_t way) {
  convert<Widen, T>(static_cast<float*>(out.data_ptr()), static_cast<const T*>(x.data_ptr()),
                    x.numel(), way);
}
template <typename T>
void narrow_as(TensorView out, TensorView x, int64_t way) {
  convert<Narrow, T>(static_cast<T*>(out.data_ptr()), static_cast<const float*>(x.data_ptr()),
                     x.numel(), way);
}

// Each returns false where this CPU lacks the way. The element count is a multiple of 16.
inline bool widen(TensorView out, TensorView x, int64_t way) {
  if (!has(way)) return false;
  host::dtype_of(x.dtype()) == host::DType::kFloat16 ? widen_as<host::Float16>(out, x, way)
                                                     : widen_as<host::BFloat16>(out, x, way);
  return true;
}
inline bool narrow(TensorView out, TensorView x, int64_t way) {
  if (!has(way)) return false;
  host::dtype_of(out.dtype()) == host::DType::kFloat16 ? narrow_as<host::Float16>(out, x, way)
                                                       : narrow_as<host::BFloat16>(out, x, way);
  return true;
}
inline bool quantise(TensorView out, TensorView x, int64_t isa) {
  if (!has(isa)) return false;
  host::run_for_isa<Narrow<host::Float8E4M3>>(static_cast<host::CpuIsa>(isa),
                                              static_cast<host::Float8E4M3*>(out.data_ptr()),
                                              static_cast<const float*>(x.data_ptr()), x.numel());
  return true;
}

}  // namespace conversions_test
