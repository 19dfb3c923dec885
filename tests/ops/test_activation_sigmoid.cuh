// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// test_activation_sigmoid.cuh: math::sigmoid of every element on a GPU.
#pragma once

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/activation_math.h"

namespace sigmoid_test {

__global__ void sigmoid_kernel(float* out, const float* x, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) out[i] = sgl_moe_jit::moe::math::sigmoid(x[i]);
}

inline void sigmoid(sgl_moe_jit::host::TensorView out, sgl_moe_jit::host::TensorView x) {
  namespace host = sgl_moe_jit::host;
  host::DeviceGuard guard(x.device().device_id);
  const auto blocks = static_cast<unsigned>((x.numel() + 255) / 256);
  host::check_cuda(
      host::launch_kernel(sigmoid_kernel, dim3(blocks), 256, false,
                          host::current_stream(x.device()), static_cast<float*>(out.data_ptr()),
                          static_cast<const float*>(x.data_ptr()), x.numel()),
      "sigmoid_test");
}

}  // namespace sigmoid_test
