# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Times the finalize kernel in launch shapes of one's choice, beside sglang's, on a GPU.

    python benchmarks/finalize_shapes/run.py --peer sglang=DIR --json FILE

For tuning `csrc/moe/finalize.cu`: each line of SHAPES becomes one kernel, called past the launcher.
Every shape is checked against float64 before it is timed; graphs take turns, as in `bench
finalize`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from sgl_moe_jit.bench import peers
from sgl_moe_jit.bench.cases import CASES, make_finalize_inputs
from sgl_moe_jit.bench.finalize import check_provider
from sgl_moe_jit.bench.model import finalize_bytes
from sgl_moe_jit.bench.timing import capture, copies_for_cold, time_graphs
from sgl_moe_jit.jit import load_jit

# top_k -> (values an access, threads, blocks a multiprocessor, vectors a thread, rows in flight)
SHAPES = {
    8: [
        (8, 128, 8, 1, 8),
        (8, 256, 4, 1, 8),
        (8, 448, 2, 2, 8),
        (8, 128, 8, 1, 4),
        (4, 128, 8, 1, 8),
    ],
    16: [(8, 128, 6, 1, 8), (8, 448, 2, 2, 4), (4, 128, 6, 1, 16)],
    4: [(8, 128, 8, 1, 4), (8, 448, 2, 2, 4)],
    1: [(8, 128, 8, 1, 1), (8, 448, 2, 2, 1)],
}
POINTS = {
    "deepseek-v3": {
        "hot": (1, 16, 32, 64, 128, 256),
        "cold": (1, 16, 64, 256, 1024, 4096, 16384),
    },
    "qwen3-30b": {"hot": (16, 256), "cold": (256, 1024, 8192)},
    "kimi-k3": {"hot": (1, 64, 256), "cold": (64, 256, 1024, 8192)},
    "gpt-oss-120b": {"hot": (64, 256), "cold": (1024, 8192)},
    "llama4": {"hot": (64, 256), "cold": (256, 8192)},
}
KERNELS = """#include "sgl_moe_jit/host/launch.cuh"
#include "sgl_moe_jit/moe/finalize.cuh"
#include "shapes.h"
namespace sgl_moe_jit {{ namespace moe {{
template <int kTopK, typename Shape>
cudaError_t go(const FinalizeParams& p, cudaStream_t stream) {{
  const int vectors = p.hidden_dim / Shape::kVec;
  const int most = Shape::kVecsPerThread * Shape::kMaxThreads;
  const int share = Shape::kVecsPerThread * ((vectors + most - 1) / most);
  const int even = ((vectors + share - 1) / share + 31) / 32 * 32;
  const int threads = Shape::kVecsPerThread > 1 ? even : Shape::kMaxThreads;
  const int columns = Shape::kVec * threads * Shape::kVecsPerThread;
  const dim3 grid(p.num_tokens, (p.hidden_dim + columns - 1) / columns);
  return host::launch_kernel(finalize_kernel<__nv_bfloat16, float, kTopK, Shape>, grid,
                             threads, true, stream, p);
}}
cudaError_t launch_shape(int i, const FinalizeParams& p, cudaStream_t stream) {{
  switch (i) {{
{cases}
  }}
  return cudaErrorInvalidValue;
}}
}} }}
"""
HEADER = """#pragma once
#include <cuda_runtime_api.h>
#include "sgl_moe_jit/moe/finalize_params.h"
namespace sgl_moe_jit { namespace moe {
cudaError_t launch_shape(int i, const FinalizeParams& p, cudaStream_t stream);
} }
"""
BINDING = """#include <tvm/ffi/function.h>
#include "sgl_moe_jit/host/cuda_call.h"
#include "sgl_moe_jit/moe/finalize_checks.h"
#include "shapes.h"
namespace host = sgl_moe_jit::host;
namespace moe = sgl_moe_jit::moe;
using host::TensorView;
void run_shape(int64_t i, TensorView out, TensorView gemm2, TensorView row_of, TensorView weights,
               TensorView shared) {
  const auto call = moe::check_finalize(out, gemm2, row_of, weights,
  host::Optional<TensorView>(shared),
                                        weights.size(1), 1.0);
  host::check_cuda(moe::launch_shape(i, call.params, host::current_stream(gemm2.device())),
  "shape");
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_shape, run_shape);
"""


def build(folder):
    """Return the module and, for each top_k, (name, number) of its shapes."""
    cases, numbers = [], {}
    for top_k, shapes in SHAPES.items():
        for shape in shapes:
            text = ", ".join(map(str, shape))
            numbers.setdefault(top_k, []).append((f"shape ({text})", len(cases)))
            cases.append(
                f"    case {len(cases)}: return go<{top_k}, FinalizeShape<{text}>>(p, stream);"
            )
    (folder / "shapes.cu").write_text(KERNELS.format(cases="\n".join(cases)))
    (folder / "shapes.h").write_text(HEADER)
    (folder / "shapes_binding.cc").write_text(BINDING)
    module = load_jit(
        "finalize_shapes",
        cuda_files=[folder / "shapes.cu"],
        cpp_files=[folder / "shapes_binding.cc"],
        extra_include_paths=[folder],
    )
    return module, numbers


def providers(module, numbers, top_k, wanted):
    def shape(number):
        return lambda x, _: (
            lambda: module.run_shape(
                number,
                x.out,
                x.gemm2_out,
                x.expanded_idx_to_permuted_idx,
                x.expert_weights,
                x.shared_output,
            )
        )

    named = dict(peers.parse_peer(text) for text in wanted)
    return named | {name: shape(number) for name, number in numbers[top_k]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", action="append", default=[], metavar="sglang=DIR")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        module, numbers = build(Path(folder))
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    for name, modes in POINTS.items():
        case = CASES[name]
        for mode, tokens in modes.items():
            for num_tokens in tokens:
                size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
                copies = copies_for_cold(size, cache) if mode == "cold" else 1
                inputs = make_finalize_inputs(case, num_tokens, copies, device="cuda")
                graphs = {}
                for who, make in providers(module, numbers, case.top_k, arguments.peer).items():
                    calls = [make(x, case.top_k) for x in inputs]
                    check_provider(who, calls[0], inputs[0], case.top_k)
                    repeats = max(1, 200 // copies) if num_tokens <= 256 else 1
                    graphs[who] = (capture(calls, repeats), copies * repeats)
                times = time_graphs(graphs, rounds=9)
                line = "  ".join(f"{who} {t.median_us:.2f}" for who, t in times.items())
                print(f"{name} {mode} {num_tokens}: {line}", flush=True)
                rows += [
                    {"case": name, "mode": mode, "num_tokens": num_tokens, "provider": who}
                    | vars(t)
                    for who, t in times.items()
                ]
                torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
