# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench waterfill``: top-k ids made ready for dispatch, beside sglang's Triton kernels and torch.

All on one GPU, as one of 8 or 32 ranks would: modes ``ep8`` and ``ep32``, buffers hot. Who balances
does so from its own tokens' loads; ``home`` only expands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sgl_moe_jit.bench import kernels
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.model import expand_bytes
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.ops import expand_topk_with_shared_expert, reference_waterfill
from sgl_moe_jit.ops.waterfill import waterfill_on
from sgl_moe_jit.ops.waterfill_kernel import WaterfillCall, WaterfillPath, can_take_one_launch

TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)
WORLD_SIZES = (8, 32)
_SOURCE = 3  # not 0, whose products vanish
_SHARED_WEIGHT = 0.4

Expanded = tuple[Tensor, Tensor]
Expansion = Callable[[Tensor, Tensor, int, int], Expanded]


@dataclass(frozen=True)
class Entry:
    """One provider.

    Attributes:
        expand: Takes ids, weights, E and W; returns ids and weights [N, K + 1].
        mode: Whose ranks are right for it: one of the op's modes, or ``home``.
    """

    expand: Expansion
    mode: str


@dataclass
class WaterfillInputs:
    """One call's tensors.

    Attributes:
        topk_ids: [N, K] int32.
        topk_weights: [N, K] float32.
        kept: The last results.
    """

    topk_ids: Tensor
    topk_weights: Tensor
    kept: Expanded | None = field(default=None, repr=False)


def make_inputs(
    case: FinalizeCase, num_tokens: int, *, device: torch.device | str
) -> WaterfillInputs:
    """Return K distinct experts a token, the first ones up to half more likely than the last."""
    generator = torch.Generator(device=device).manual_seed(0)
    scores = torch.rand(num_tokens, case.num_experts, generator=generator, device=device)
    places = torch.arange(case.num_experts, device=device) / case.num_experts
    ids = (scores ** (1 + places / 2)).topk(case.top_k).indices.int()
    weights = torch.rand(ids.shape, generator=generator, device=device)
    return WaterfillInputs(ids, weights)


def _ours(
    mode: str, path: WaterfillPath | None, ids: Tensor, weights: Tensor, experts: int, ranks: int
) -> Expanded:
    call = WaterfillCall(ids, weights, experts, ranks, _SOURCE, _SHARED_WEIGHT, mode)
    return waterfill_on(path, call)


def _home(ids: Tensor, weights: Tensor, experts: int, ranks: int) -> Expanded:
    return expand_topk_with_shared_expert(ids, weights, experts, ranks, _SOURCE, _SHARED_WEIGHT)


def torch_home(ids: Tensor, weights: Tensor, experts: int, ranks: int) -> Expanded:
    """What is written without a kernel, shared experts at home."""
    local = experts // ranks
    valid = ids >= 0
    live = valid.any(1, keepdim=True)
    slot = _SOURCE * (local + 1) + local
    sent = torch.where(valid, ids + torch.div(ids, local, rounding_mode="floor"), ids)
    shared = torch.where(live, slot, -1).to(ids.dtype)
    kept = torch.where(valid, weights, 0)
    shared_weight = (live * _SHARED_WEIGHT).to(weights.dtype)
    return torch.cat((sent, shared), 1), torch.cat((kept, shared_weight), 1)


def sglang(folder: Path, ids: Tensor, weights: Tensor, experts: int, ranks: int) -> Expanded:
    """Count with one kernel of sglang, expand with the other, as its static balancer does."""
    module = kernels.sglang_waterfill(str(folder))
    num_tokens, top_k = ids.shape
    counts = torch.zeros(ranks, dtype=torch.int64, device=ids.device)
    rows = 256
    module._count_routed_per_rank_kernel[(-(-num_tokens // rows),)](
        ids, counts, num_tokens, top_k, experts // ranks, ranks, BLOCK_SIZE=rows
    )
    expanded: Expanded = module.materialize_waterfill_dispatch_fused(
        ids, weights, counts, experts, ranks, _SOURCE, _SHARED_WEIGHT, allow_all_ranks=True
    )
    return expanded


def entries(case: FinalizeCase, num_tokens: int, folder: Path | None) -> dict[str, Entry]:
    """Return the providers for a shape, by name, ours first; then our paths, chosen by force."""
    found = {"sgl_moe_jit": Entry(functools.partial(_ours, "exact", None), "exact")}
    for path in WaterfillPath:
        fits = can_take_one_launch(num_tokens, case.top_k, "exact")
        if fits or path is not WaterfillPath.ONE_LAUNCH:
            name = f"sgl_moe_jit, {path.name.lower().replace('_', ' ')}"
            found[name] = Entry(functools.partial(_ours, "exact", path), "exact")
    for name, mode in (("restricted", "exact_restricted"), ("sampled", "sampled")):
        found[f"sgl_moe_jit, {name}"] = Entry(functools.partial(_ours, mode, None), mode)
    found["sgl_moe_jit, home"] = Entry(_home, "home")
    if folder is not None:
        found["sglang"] = Entry(functools.partial(sglang, folder), "sampled")
    found["torch, home"] = Entry(torch_home, "home")
    return found


def right_answers(x: WaterfillInputs, experts: int, ranks: int) -> dict[str, Expanded]:
    """Return the oracle's ids and weights by mode, on a CPU."""
    ids, weights = x.topk_ids.cpu(), x.topk_weights.cpu()
    shape = (experts, ranks)
    chosen: dict[str, int | Sequence[int]] = {
        "home": _SOURCE,
        "exact": reference_waterfill.exact(ids, *shape, _SOURCE),
        "exact_restricted": reference_waterfill.restricted(ids, *shape, _SOURCE),
        "sampled": reference_waterfill.sampled(ids, *shape, _SOURCE),
    }
    return {
        mode: reference_waterfill.expand(ids, weights, *shape, where, _SHARED_WEIGHT)
        for mode, where in chosen.items()
    }


def check(name: str, got: Expanded, want: Expanded) -> None:
    """Compare ids and weights with the oracle's.

    Raises:
        WrongResultError: a bit differs.
    """
    for what, have, oracle in zip(("ids", "weights"), got, want, strict=True):
        if not torch.equal(have.cpu(), oracle):
            count = int((have.cpu() != oracle).sum())
            raise WrongResultError(f"{name}: {count} of {oracle.numel()} {what} differ")


def _enter(
    name: str,
    expand: Expansion,
    x: WaterfillInputs,
    experts: int,
    ranks: int,
    want: Expanded,
) -> Contestant:
    def call() -> None:
        x.kept = expand(x.topk_ids, x.topk_weights, experts, ranks)

    def run_and_check() -> None:
        call()
        assert x.kept is not None
        check(name, x.kept, want)

    return Contestant([call], run_and_check)


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another: int32 ids, float32 weights."""
    folder = options.folders.get("sglang")
    every = {}
    for case in options.cases:
        for num_tokens in (1, 1 << 20):
            every.update(entries(case, num_tokens, folder))
    wanted = options.choose(every)
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            x = make_inputs(case, num_tokens, device="cuda")
            there = entries(case, num_tokens, folder)
            size = expand_bytes(num_tokens, case.top_k, 4, 4)
            for ranks in WORLD_SIZES:
                if case.num_experts % ranks:
                    continue
                want = right_answers(x, case.num_experts, ranks)
                contestants: dict[str, Callable[[], Contestant]] = {
                    name: functools.partial(
                        _enter, name, entry.expand, x, case.num_experts, ranks, want[entry.mode]
                    )
                    for name, entry in there.items()
                    if name in wanted
                }
                mode = f"ep{ranks}"
                outcomes = contest.on_cuda(f"{case.name}, {num_tokens} tokens, {mode}", contestants)
                yield [
                    Record.of("waterfill", case, num_tokens, mode, name, outcome, size)
                    for name, outcome in outcomes.items()
                ]
