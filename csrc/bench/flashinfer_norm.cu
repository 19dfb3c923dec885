// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/flashinfer_norm.cu: flashinfer's fused add-RMSNorm, from its own header, as a peer.
#include <flashinfer/norm.cuh>

#include "bench/add_rmsnorm_launch.h"

namespace sgl_moe_jit {
namespace bench {

cudaError_t launch_add_rmsnorm(const AddRmsnormParams& p, cudaStream_t stream) {
  using T = __nv_bfloat16;
  const bool enable_pdl = true;
  return flashinfer::norm::FusedAddRMSNorm(static_cast<T*>(p.x), static_cast<T*>(p.residual),
                                           static_cast<T*>(p.weight), p.num_tokens, p.hidden_dim,
                                           p.hidden_dim, p.hidden_dim, p.eps, enable_pdl, stream);
}

}  // namespace bench
}  // namespace sgl_moe_jit
