// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/route_topk.cu: which size of the routing kernel serves a call.
//
// The build passes SMJ_LOGIT (__nv_bfloat16, __half or float).
#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/route_topk.cuh"
#include "sgl_moe_jit/moe/route_topk_launch.h"

namespace sgl_moe_jit {
namespace moe {
namespace {

using Logit = SMJ_LOGIT;

template <int kValues>
cudaError_t launch(const RouteParams& p, bool enable_pdl, cudaStream_t stream) {
  const int64_t blocks = (p.num_tokens + route::kWarps - 1) / route::kWarps;
  return host::launch_kernel(route_topk_kernel<Logit, kValues>, dim3(static_cast<unsigned>(blocks)),
                             route::kThreads, enable_pdl, stream, p);
}

}  // namespace

// Up to 64, 128, 256 (DeepSeek-V3), 384 (Kimi K2), 512 and 1024 experts.
cudaError_t launch_route_topk(const RouteParams& p, bool enable_pdl, cudaStream_t stream) {
  const int values = (p.num_experts + 31) / 32;
  if (values <= 2) return launch<2>(p, enable_pdl, stream);
  if (values <= 4) return launch<4>(p, enable_pdl, stream);
  if (values <= 8) return launch<8>(p, enable_pdl, stream);
  if (values <= 12) return launch<12>(p, enable_pdl, stream);
  if (values <= 16) return launch<16>(p, enable_pdl, stream);
  return launch<32>(p, enable_pdl, stream);
}

}  // namespace moe
}  // namespace sgl_moe_jit
