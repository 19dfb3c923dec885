# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench finalize`` and ``bench cpu``: the fused op beside its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from sgl_moe_jit.bench.cases import FinalizeCase, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.model import finalize_bytes
from sgl_moe_jit.bench.peers import Provider
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import Timing, capture, copies_for_cold, time_cpu, time_graphs
from sgl_moe_jit.ops import reference

# A graph of at least so many calls, so that starting the graph weighs little.
_CALLS_A_GRAPH = 200
_HOT_LIMIT = 256  # tokens; above, one call's rows fill the cache by themselves
_CHECKED_TOKENS = 64


def check_provider(
    name: str, call: Callable[[], object], inputs: FinalizeInputs, top_k: int
) -> None:
    """Compare a provider with the float64 oracle on the first tokens.

    Allowed is three roundings of bfloat16, since peers may round the routed sum before the add.

    Raises:
        AssertionError: it is wrong; a wrong provider is not timed.
    """
    inputs.out.fill_(float("nan"))
    call()
    n = min(_CHECKED_TOKENS, inputs.out.shape[0])
    arguments = (
        inputs.gemm2_out,
        inputs.expanded_idx_to_permuted_idx[:n],
        inputs.expert_weights[:n],
        inputs.shared_output[:n],
        top_k,
    )
    want = reference.moe_finalize_fuse_shared(*arguments)
    magnitude = reference.moe_finalize_fuse_shared(
        inputs.gemm2_out.abs(), *arguments[1:3], inputs.shared_output[:n].abs(), top_k
    )
    wrong = ~((inputs.out[:n].double() - want).abs() <= 3 * 2.0**-8 * magnitude)
    assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"
    assert not inputs.out.isnan().any(), f"{name}: elements were left unwritten"


def _record(
    subject: str, case: FinalizeCase, num_tokens: int, mode: str, provider: str, timing: Timing
) -> Record:
    size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
    return Record(
        subject,
        case.name,
        num_tokens,
        case.hidden_dim,
        case.top_k,
        mode,
        "float32",
        provider,
        timing,
        size,
    )


def bench_cuda(
    case: FinalizeCase,
    num_tokens: int,
    mode: str,
    providers: Mapping[str, Provider],
    rounds: int = 25,
) -> list[Record]:
    """Time every provider on one shape, interleaved, in CUDA graphs.

    Args:
        case: The model's shape; bfloat16 rows, float32 weights.
        num_tokens: T.
        mode: ``hot`` or ``cold``, see :mod:`sgl_moe_jit.bench.timing`.
        providers: By name.
        rounds: Samples a provider.
    """
    size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    copies = copies_for_cold(size, cache) if mode == "cold" else 1
    inputs = make_finalize_inputs(case, num_tokens, copies, device="cuda")
    repeats = max(1, _CALLS_A_GRAPH // copies) if num_tokens <= _HOT_LIMIT else 1
    graphs = {}
    for name, provider in providers.items():
        calls = [provider(x, case.top_k) for x in inputs]
        check_provider(name, calls[0], inputs[0], case.top_k)
        graphs[name] = (capture(calls, repeats), len(calls) * repeats)
    timings = time_graphs(graphs, rounds)
    return [_record("finalize", case, num_tokens, mode, n, t) for n, t in timings.items()]


def bench_cpu(
    case: FinalizeCase,
    num_tokens: int,
    providers: Mapping[str, Provider],
    buffer_bytes: int,
    rounds: int = 25,
) -> list[Record]:
    """Time every provider on one shape on the CPU, rotating buffers past ``buffer_bytes``."""
    size = finalize_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
    copies = max(2, buffer_bytes // size + 1)
    inputs = make_finalize_inputs(case, num_tokens, copies, device="cpu")
    calls = {}
    for name, provider in providers.items():
        calls[name] = [provider(x, case.top_k) for x in inputs]
        check_provider(name, calls[name][0], inputs[0], case.top_k)
    timings = time_cpu(calls, rounds)
    return [_record("cpu", case, num_tokens, "cold", n, t) for n, t in timings.items()]


def modes_of(num_tokens: int, wanted: Sequence[str]) -> list[str]:
    """Return which of the wanted modes say something at this size."""
    return [mode for mode in wanted if mode == "cold" or num_tokens <= _HOT_LIMIT]
