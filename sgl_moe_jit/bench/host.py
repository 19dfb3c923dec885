# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench host``: what one eager call costs the host, from Python to the launch.

Batches of calls on a wall clock. On a GPU the queue is emptied between batches and a batch fits
into it, so no call waits for the device. On a CPU the work itself is part of the time, so the
tensors are tiny there.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sgl_moe_jit.bench import kernels, timing
from sgl_moe_jit.bench.cases import CASES, FinalizeCase, FinalizeInputs, make_finalize_inputs
from sgl_moe_jit.bench.checks import check_provider
from sgl_moe_jit.bench.contest import Contest, Contestant, Outcome
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import Call, Timing
from sgl_moe_jit.env import launch_flags
from sgl_moe_jit.jit import families, load_spec
from sgl_moe_jit.ops import moe_finalize_fuse_shared, quick_call
from sgl_moe_jit.ops.cpu_threads import cpu_workers
from sgl_moe_jit.ops.finalize_kernel import OP, cuda_kernel
from sgl_moe_jit.ops.library import cpu_isa

_BATCH = 100  # calls; a GPU's queue takes some 1000
_WARMUP = 3
_TINY = FinalizeCase("tiny", 64, 64, 2, 8)
_TOKENS = {"cuda": 8, "cpu": 1}
_IN_PYTHON = ", in Python"  # the same call with the extension left out


def our_export(device: str, top_k: int) -> tuple[Any, tuple[Any, ...]]:
    """Return our export that writes into ``out``, and what it takes after the input tensors."""
    gate_logits, factor = None, 1.0
    if device == "cuda":
        index = torch.cuda.current_device()
        kernel = cuda_kernel(torch.bfloat16, torch.float32, top_k, False, index)
        return kernel.write, (gate_logits, top_k, factor, launch_flags())
    family = next(family for family in families() if family.name == OP)
    module = load_spec(next(iter(family.cpu_specs())))
    return module.moe_finalize, (gate_logits, top_k, factor, cpu_isa(), *cpu_workers())


def engine_wrapper(look_up: Callable[[], Any]) -> Callable[..., Tensor]:
    """Return a wrapper that does per call what sglang 0.5.23's does, written anew.

    That is: assertions on dtypes and shapes, ``torch.empty``, a look-up of the module in a memo
    keyed by its (empty) arguments, two conversions of scalars, the module's call. It is a plain
    Python function there, not a registered torch op.
    """
    memo: dict[Any, Any] = {}

    def module(*args: Any, **kwargs: Any) -> Any:
        key = (*args, *sorted(kwargs.items()))
        if key in memo:
            return memo[key]
        return memo.setdefault(key, look_up(*args, **kwargs))

    def wrapper(x: FinalizeInputs, rows: Tensor, top_k: int, enable_pdl: bool = True) -> Tensor:
        assert x.gemm2_out.dtype == torch.bfloat16
        assert x.expert_weights.dtype in (torch.float32, torch.bfloat16)
        assert rows.dtype == torch.int32
        assert x.gemm2_out.dim() == 2 and x.expert_weights.dim() == 2
        num_tokens, slots = x.expert_weights.shape
        assert slots == top_k
        shared = x.shared_output
        assert shared.dtype == torch.bfloat16 and shared.dim() == 2
        assert shared.shape[0] == num_tokens
        hidden_dim = shared.shape[1]
        assert hidden_dim <= x.gemm2_out.shape[1]
        out = torch.empty(num_tokens, hidden_dim, dtype=torch.bfloat16, device=x.gemm2_out.device)
        module()(
            out,
            x.gemm2_out,
            rows,
            x.expert_weights,
            shared,
            int(top_k),
            bool(enable_pdl),
        )
        return out

    return wrapper


def providers(x: FinalizeInputs, top_k: int, folders: Mapping[str, Any]) -> dict[str, Call]:
    """Return one call of each kind, by name, ours first."""
    device = x.out.device
    write, rest = our_export(device.type, top_k)
    tensors = (x.gemm2_out, x.expanded_idx_to_permuted_idx, x.expert_weights, x.shared_output)
    if "sglang" in folders and device.type == "cuda":
        kernel = kernels.sglang_finalize(str(folders["sglang"]))
        like, name = engine_wrapper(lambda: kernel), "sglang's wrapper"
    else:
        like = engine_wrapper(lambda: lambda *arguments: write(*arguments[:5], *rest))
        name = "wrapper like sglang's"
    shape = tuple(x.out.shape)
    rows = x.expanded_idx_to_permuted_idx.view(-1)  # flat, as the engine's runner hands them over
    ours: dict[str, Call] = {
        "sgl_moe_jit": lambda: moe_finalize_fuse_shared(*tensors, top_k),
        "sgl_moe_jit, out=": lambda: moe_finalize_fuse_shared(*tensors, top_k, out=x.out),
    }
    if quick_call.state()[0]:
        ours.update({name + _IN_PYTHON: call for name, call in ours.items()})
    return {
        **ours,
        name: lambda: like(x, rows, top_k),
        "raw call": lambda: write(x.out, *tensors, *rest),
        "torch.empty": lambda: torch.empty(shape, dtype=torch.bfloat16, device=device),
        "torch add_": lambda: x.out.add_(x.shared_output),
    }


def time_host(calls: Mapping[str, Call], rounds: int, synchronize: Call) -> dict[str, Timing]:
    """Return microseconds a call of the host's time, batches in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i, order in enumerate(timing.turns(list(calls), _WARMUP + rounds)):
            for name in order:
                call = calls[name]
                with quick_call.in_python() if name.endswith(_IN_PYTHON) else nullcontext():
                    synchronize()
                    begin = time.perf_counter()
                    for _ in range(_BATCH):
                        call()
                    took = time.perf_counter() - begin
                if i >= _WARMUP:
                    samples[name].append(took / _BATCH * 1e6)
        synchronize()
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(values) for name, values in samples.items()}


def _door(name: str) -> str | None:
    """Return by which way our op's call reaches its kernel."""
    if not name.startswith("sgl_moe_jit"):
        return None
    compiled, why = quick_call.state()
    if compiled and not name.endswith(_IN_PYTHON):
        return "C extension"
    return "Python" if compiled else f"Python: {why}"


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of the one shape: DeepSeek-V3's on a GPU, a tiny one on a CPU."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    case = CASES["deepseek-v3"] if on_gpu else _TINY
    (x,) = make_finalize_inputs(case, _TOKENS[device], 1, device=device)
    calls = options.choose(providers(x, case.top_k, options.folders))

    def contestant(name: str) -> Contestant:
        writes_out = "out=" in name or name == "raw call"

        def check() -> None:
            if writes_out:
                check_provider(name, calls[name], x, case.top_k)
            else:
                calls[name]()

        return Contestant([calls[name]], check)

    made = contest.enter("host", {name: functools.partial(contestant, name) for name in calls})
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    times = time_host({name: calls[name] for name in made}, contest.rounds, wait)
    yield [
        Record.of("host", case, _TOKENS[device], "eager", name, Outcome(took, _door(name)), 0)
        for name, took in times.items()
    ]
