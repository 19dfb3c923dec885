// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// DtypeDecl.h: the element types that flashinfer's finalize names.
//
// flashinfer downloads the header of this name at run time, with its GEMM kernels. Its finalize
// only tells types apart by it, so names and bits are all that is needed; the numbers are ours.
#pragma once

namespace batchedGemm {
namespace trtllm {
namespace gen {

enum class Dtype { E2m1, E4m3, Fp16, Bfloat16, Fp32 };

inline int dtypeGetNumBits(Dtype dtype) {
  switch (dtype) {
    case Dtype::E2m1:
      return 4;
    case Dtype::E4m3:
      return 8;
    case Dtype::Fp16:
    case Dtype::Bfloat16:
      return 16;
    case Dtype::Fp32:
      return 32;
  }
  return 0;
}

}  // namespace gen
}  // namespace trtllm
}  // namespace batchedGemm
