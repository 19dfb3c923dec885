// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// test_activation_sigmoid.cuh: math::sigmoid and math::reciprocal of every element on a GPU.
#pragma once

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/activation_math.h"

namespace sigmoid_test {

template <bool kSigmoid>
__global__ void each_kernel(float* out, const float* x, int64_t count) {
  namespace math = sgl_moe_jit::moe::math;
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) out[i] = kSigmoid ? math::sigmoid(x[i]) : math::reciprocal(x[i]);
}

template <bool kSigmoid>
void each(sgl_moe_jit::host::TensorView out, sgl_moe_jit::host::TensorView x) {
  namespace host = sgl_moe_jit::host;
  host::DeviceGuard guard(x.device().device_id);
  const auto blocks = static_cast<unsigned>((x.numel() + 255) / 256);
  host::check_cuda(
      host::launch_kernel(each_kernel<kSigmoid>, dim3(blocks), 256, false,
                          host::current_stream(x.device()), static_cast<float*>(out.data_ptr()),
                          static_cast<const float*>(x.data_ptr()), x.numel()),
      "sigmoid_test");
}

inline void sigmoid(sgl_moe_jit::host::TensorView out, sgl_moe_jit::host::TensorView x) {
  each<true>(out, x);
}
inline void reciprocal(sgl_moe_jit::host::TensorView out, sgl_moe_jit::host::TensorView x) {
  each<false>(out, x);
}

}  // namespace sigmoid_test
