// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// bench/flashinfer_finalize.cu: flashinfer's finalize of the trtllm backend, from its own launcher.
//
// Its file also holds activation, permutation and conversion, and instantiates every kernel for six
// pairs of dtypes: 51 s of nvcc 13.0 for sm_90a on a 2-core EPYC virtual machine, 2026-11-29. The
// macros below leave the launches that the comparison makes (bfloat16 rows, float32 weights, one
// input); the kernels and the choice between them are untouched.
#include <flashinfer/trtllm/fused_moe/DevKernel.h>

#undef LAUNCH
#define LAUNCH(...)
#undef LAUNCH_ACTIVATION
#define LAUNCH_ACTIVATION(...)
#undef LAUNCH_TOPK_EXPW_SINGLE_INPUT
#define LAUNCH_TOPK_EXPW_SINGLE_INPUT(...)
#undef LAUNCH_FINALIZE_PDL
#define LAUNCH_FINALIZE_PDL LAUNCH_FINALIZE_SINGLE_INPUT_PDL
#undef LAUNCH_EXPW
#define LAUNCH_EXPW(launch, data, kernel, topK, numBlocks, numThreads, smemSize, stream)    \
  launch(data, LAUNCH_ESC(cutlass::bfloat16_t, float, topK), kernel, numBlocks, numThreads, \
         smemSize, stream);

#include <csrc/fused_moe/trtllm_backend/trtllm_fused_moe_dev_kernel.cu>

#include "bench/flashinfer_finalize_launch.h"

namespace sgl_moe_jit {
namespace bench {

void launch_flashinfer_finalize(const FlashinferFinalizeParams& p, cudaStream_t stream) {
  using batchedGemm::trtllm::gen::Dtype;
  ::moe::dev::finalize::Data data{};
  data.mDtypeElt = Dtype::Bfloat16;
  data.mDtypeExpW = Dtype::Fp32;
  data.mUsePdl = true;
  data.inPtr = p.gemm2_out;
  data.outPtr = p.out;
  data.expertWeightsPtr = p.expert_weights;
  data.expandedIdxToPermutedIdx = p.row_of;
  data.numTokens = p.num_tokens;
  data.topK = p.top_k;
  data.hiddenDim = p.hidden_dim;
  data.hiddenDimPadded = p.padded_hidden_dim;
  ::moe::dev::finalize::run(data, stream);
}

}  // namespace bench
}  // namespace sgl_moe_jit
