// SPDX-FileCopyrightText: The sgl_moe_jit authors
// SPDX-License-Identifier: Apache-2.0
//
// moe/finalize_cpu_binding.cc: the TVM-FFI door of the CPU finalize.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "finalize_cpu.h"
#include "finalize_cpu_checks.h"
#include "sgl_moe_jit/moe/finalize_checks.h"
#include "sgl_moe_jit/moe/finalize_quick.h"

namespace {

namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::Optional;
using host::TensorView;

void run(const moe::FinalizeCall& call, int64_t isa, int64_t threads, int64_t openmp) {
  if (call.params.num_tokens == 0) return;
  moe::finalize_cpu(call.params, moe::float_type(call.activation), moe::float_type(call.weight),
                    moe::resolve_isa(isa), host::Workers(threads, openmp));
}

void moe_finalize(TensorView out, TensorView gemm2_out, TensorView row_of,
                  Optional<TensorView> weights, Optional<TensorView> shared,
                  Optional<TensorView> gate_logits, int64_t top_k, double routed_factor,
                  int64_t isa, int64_t threads, int64_t openmp) {
  moe::check_is_cpu(gemm2_out);
  const moe::FinalizeInputs in{gemm2_out, row_of, weights, shared, gate_logits};
  const moe::FinalizeCall call = moe::check_finalize(out, in, top_k, routed_factor);
  moe::check_indices(call.params);
  run(call, isa, threads, openmp);
}

// For an output of its own, in rows side by side.
moe::FinalizeCall check_new(const moe::FinalizeInputs& in, const Optional<int64_t>& hidden_dim,
                            int64_t top_k, double routed_factor) {
  moe::FinalizeCall call = moe::check_finalize_inputs(in, moe::output_width(in, hidden_dim),
                                                      moe::width_name(in), top_k, routed_factor);
  moe::check_indices(call.params);
  call.params.out_stride = call.params.hidden_dim;
  return call;
}

// Before there is an output of its own.
void check(TensorView gemm2_out, TensorView row_of, Optional<TensorView> weights,
           Optional<TensorView> shared, Optional<TensorView> gate_logits, int64_t top_k,
           double routed_factor, Optional<int64_t> hidden_dim) {
  moe::check_is_cpu(gemm2_out);
  check_new({gemm2_out, row_of, weights, shared, gate_logits}, hidden_dim, top_k, routed_factor);
}

bool quick_finalize(host::QuickCall* quick) noexcept {
  return host::quick_answer([quick] {
    const moe::QuickFinalize x(*quick);
    moe::check_is_cpu(x.gemm2_out);
    moe::FinalizeCall call;
    if (x.out.has_value()) {
      if (!x.fits_out()) return false;
      call = moe::check_finalize(x.out.value(), x.inputs(), x.top_k, x.factor);
      moe::check_indices(call.params);
    } else {
      call = check_new(x.inputs(), x.hidden_dim, x.top_k, x.factor);
      call.params.out = x.make_out(quick, call.params);
    }
    run(call, quick->cpu[0], quick->cpu[1], quick->cpu[2]);
    return true;
  });
}

int64_t quick_address() { return host::address_of(quick_finalize); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_finalize, moe_finalize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check, check);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quick_address, quick_address);
