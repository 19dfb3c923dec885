// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/permute_binding.cc: the TVM-FFI door of the CUDA permute: validate, guard, stream, launch.
#include <tvm/ffi/function.h>

#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/permute_checks.h"
#include "sgl_moe_jit/moe/permute_launch.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;

void moe_permute(TensorView permuted, TensorView row_of, TensorView expert_offsets,
                 TensorView hidden, TensorView topk_ids, host::Optional<TensorView> scratch,
                 int64_t alignment, int64_t path, bool enable_pdl, bool allow_vector) {
  host::check_is_cuda("hidden_states", hidden);
  const moe::PermuteParams params =
      moe::check_permute(permuted, row_of, expert_offsets, hidden, topk_ids, scratch, alignment);
  const moe::PermutePath chosen = moe::check_permute_path(params, path);
  host::DeviceGuard guard(hidden.device().device_id);
  host::check_cuda(moe::launch_permute(params, chosen, enable_pdl, allow_vector,
                                       host::current_stream(hidden.device())),
                   "moe_permute");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_permute, moe_permute);
