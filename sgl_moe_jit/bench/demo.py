# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The main job on this machine, end to end: a real model, the fused finalize, the JIT."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_moe_jit import __version__
from sgl_moe_jit.bench.demo_finalize import FinalizeResult, time_finalize
from sgl_moe_jit.bench.demo_jit import JitResult, time_first_calls
from sgl_moe_jit.bench.demo_layer import LayerErrors, compare_bfloat16
from sgl_moe_jit.bench.demo_model import SeedResult, build_model, compare_float32

logger = logging.getLogger("sgl_moe_jit.bench")

DEFAULT_SEEDS = (1, 2, 3)
MAX_LOGIT_DIFF = 1e-4


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured; :meth:`to_json` names it for machines."""

    device: str
    stock: str
    seeds: tuple[SeedResult, ...]
    bfloat16: tuple[LayerErrors, ...]
    finalize: tuple[FinalizeResult, ...]
    jit: JitResult

    @property
    def tokens_agree(self) -> bool:
        """Whether every generated token of every seed is the stock model's."""
        return all(seed.tokens_equal == seed.tokens for seed in self.seeds)

    @property
    def max_logit_diff(self) -> float:
        """The largest logit difference of all seeds; NaN when one is NaN."""
        return float(torch.tensor([seed.max_logit_diff for seed in self.seeds]).max())

    @property
    def headline(self) -> FinalizeResult:
        """The finalize of 64 tokens."""
        return next(case for case in self.finalize if case.num_tokens == 64)

    @property
    def bfloat16_no_larger(self) -> bool:
        """Whether the fused layers' errors are no larger than stock's, by rms and 99.9 %, each."""
        return all(
            layer.fused.rms <= layer.stock.rms and layer.fused.p999 <= layer.stock.p999
            for layer in self.bfloat16
        )

    @property
    def ok(self) -> bool:
        """Whether ours does what the stock model does, and the finalize is within its bound."""
        right = all(case.within_tolerance for case in self.finalize)
        return self.tokens_agree and self.max_logit_diff <= MAX_LOGIT_DIFF and right

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``demo --json`` prints."""
        return {
            "ok": self.ok,
            "device": self.device,
            "versions": versions(),
            "stock": self.stock,
            "tokens_agree": self.tokens_agree,
            "max_logit_diff": self.max_logit_diff,
            "max_logit_diff_allowed": MAX_LOGIT_DIFF,
            "seeds": [asdict(seed) for seed in self.seeds],
            "bf16_no_larger": self.bfloat16_no_larger,
            "bf16_layers": [asdict(layer) for layer in self.bfloat16],
            "finalize": {
                **asdict(self.headline),
                "hidden_dim": 7168,
                "top_k": 8,
                "cases": [asdict(case) for case in self.finalize],
            },
            "jit": asdict(self.jit),
        }


def versions() -> dict[str, str]:
    """Return the versions a number depends on."""
    import transformers
    import tvm_ffi

    return {
        "sgl_moe_jit": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "tvm_ffi": str(tvm_ffi.__version__),
        "transformers": str(transformers.__version__),
    }


def device_name(device: torch.device) -> str:
    """Return what a reader calls the device."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    model = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        names = [line for line in info.splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    except OSError:
        pass
    return f"cpu: {model}, {torch.get_num_threads()} threads"


def choose_device(name: str | None) -> torch.device:
    """Return the named device; None takes a GPU when there is one.

    Raises:
        ValueError: ``cuda`` was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device: expected a CUDA device or driver, found none; use cpu")
    return torch.device(name or ("cuda" if available else "cpu"))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's CPU operations on one thread.

    A model this small gains nothing from more, and on a busy machine threads that spin for each
    other cost a multiple: 42 s of processor time a demo against 14 s, on 2 cores at a load of 5
    (2026-11-29).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_demo(
    seeds: Sequence[int] = DEFAULT_SEEDS, device: torch.device | None = None
) -> DemoResult:
    """Run every part on one device. Progress goes to the logger at INFO."""
    device = choose_device(None) if device is None else device
    logger.info("demo on %s", device_name(device))
    logger.info("compiling the finalize kernel into an empty cache, in a child process")
    jit = time_first_calls(device.type)
    results: list[SeedResult] = []
    layers: list[LayerErrors] = []
    stock = ""
    for seed in seeds:
        logger.info("seed %d: generating with the stock and with the fused model", seed)
        with _one_thread():
            model = build_model(seed, device)
            stock = str(getattr(model.config, "_experts_implementation", "unknown"))
            results.append(compare_float32(model, seed))
            layers += compare_bfloat16(model.to(torch.bfloat16))
    sizes = (1, 64, 4096) if device.type == "cuda" else (64,)
    cases = []
    for num_tokens in sizes:
        logger.info("timing the finalize of %d tokens", num_tokens)
        cases.append(time_finalize(num_tokens, device))
    return DemoResult(device_name(device), stock, tuple(results), tuple(layers), tuple(cases), jit)
