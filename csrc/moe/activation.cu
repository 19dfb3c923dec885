// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/activation.cu: which shape of the silu_and_mul kernel serves a call.
//
// The build passes SMJ_ACTIVATION (cutlass::bfloat16_t, cutlass::half_t or float).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/activation.cuh"
#include "sgl_moe_jit/moe/activation_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Element = SMJ_ACTIVATION;

template <int kVec>
cudaError_t launch(const ActivationParams& p, bool enable_pdl, cudaStream_t stream) {
  constexpr int64_t kColumns = kActivationThreads * kVec;
  const dim3 grid(static_cast<unsigned>(p.num_rows),
                  static_cast<unsigned>((p.width + kColumns - 1) / kColumns));
  return host::launch_kernel(silu_and_mul_kernel<Element, kVec>, grid, kActivationThreads,
                             enable_pdl, stream, p);
}

}  // namespace

cudaError_t launch_silu_and_mul(const ActivationParams& p, bool enable_pdl, bool allow_vector,
                                cudaStream_t stream) {
  constexpr uint64_t kBytes = 16, kItem = sizeof(Element);
  const uint64_t together = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out) |
                            static_cast<uint64_t>(p.x_stride) * kItem |
                            static_cast<uint64_t>(p.width) * kItem;
  if (allow_vector && together % kBytes == 0) {
    return launch<static_cast<int>(kBytes / kItem)>(p, enable_pdl, stream);
  }
  return launch<1>(p, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
