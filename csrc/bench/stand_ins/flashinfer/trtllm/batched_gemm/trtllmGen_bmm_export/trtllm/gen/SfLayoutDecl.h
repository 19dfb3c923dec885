// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// SfLayoutDecl.h: the scale-factor layouts that the file of flashinfer's finalize names beside it.
//
// A stand-in like DtypeDecl.h; the finalize has no scale factors.
#pragma once

namespace batchedGemm {
namespace trtllm {
namespace gen {

enum class SfLayout { Linear, R8c4, R8c16, R128c4 };

}  // namespace gen
}  // namespace trtllm
}  // namespace batchedGemm
