// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize.cu: which shape of the finalize kernel serves a call.
//
// The build passes SMJ_ACTIVATION and SMJ_WEIGHT (__nv_bfloat16 or float) and SMJ_TOP_K (0: any).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"
#include "sgl_moe_jit/moe/finalize_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Act = SMJ_ACTIVATION;
using Weight = SMJ_WEIGHT;
constexpr int kTopK = SMJ_TOP_K;

template <int kVec, int kThreads, int kVecsPerThread>
cudaError_t launch(const FinalizeParams& p, bool enable_pdl, cudaStream_t stream) {
  constexpr int kColumns = kVec * kThreads * kVecsPerThread;
  const dim3 grid(static_cast<unsigned>(p.num_tokens), (p.hidden_dim + kColumns - 1) / kColumns);
  return host::launch_kernel(finalize_kernel<Act, Weight, kTopK, kVec, kThreads, kVecsPerThread>,
                             grid, kThreads, enable_pdl, stream, p);
}

// Whether every access of kBytes that the kernel would make is aligned and inside its row.
bool fits_vector(const FinalizeParams& p, int bytes) {
  const auto aligned = [bytes](const void* base, int64_t stride) {
    return reinterpret_cast<uintptr_t>(base) % bytes == 0 &&
           stride * static_cast<int64_t>(sizeof(Act)) % bytes == 0;
  };
  return static_cast<int64_t>(p.hidden_dim) * static_cast<int64_t>(sizeof(Act)) % bytes == 0 &&
         aligned(p.out, p.out_stride) && aligned(p.gemm2_out, p.gemm2_stride) &&
         (p.shared == nullptr || aligned(p.shared, p.shared_stride));
}

}  // namespace

cudaError_t launch_finalize(const FinalizeParams& p, bool enable_pdl, bool allow_vector,
                            cudaStream_t stream) {
  constexpr int kHalf = 8 / sizeof(Act), kFull = 16 / sizeof(Act);
  if (!allow_vector || !fits_vector(p, 8)) return launch<1, 256, 1>(p, enable_pdl, stream);
  if (p.num_tokens <= 128 || !fits_vector(p, 16))
    return launch<kHalf, 128, 1>(p, enable_pdl, stream);
  return launch<kFull, 128, 1>(p, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
