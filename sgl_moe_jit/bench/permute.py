# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``bench permute``: rows copied into expert order, beside torch's sort and gather."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sgl_moe_jit.bench import finalize
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Contest, Contestant, WrongResultError
from sgl_moe_jit.bench.model import permute_bytes
from sgl_moe_jit.bench.options import Options
from sgl_moe_jit.bench.report import Record
from sgl_moe_jit.bench.timing import Call, copies_for_cold
from sgl_moe_jit.ops import reference_permute
from sgl_moe_jit.ops.permute import moe_permute, permute_on
from sgl_moe_jit.ops.permute_kernel import PermutePath

TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)

# Up to how many slots a path is worth timing, or has room at all.
_MOST_SLOTS = {
    PermutePath.ONE_LAUNCH: 4096,
    PermutePath.TWO_LAUNCHES: 1 << 15,
    PermutePath.FOUR_LAUNCHES: 2**31 - 1,
}
_ONE_LAUNCH_EXPERTS = 1024

Permuted = tuple[Tensor, Tensor, Tensor]
Permutation = Callable[[Tensor, Tensor, int], Permuted]


@dataclass
class PermuteInputs:
    """One call's tensors.

    Attributes:
        hidden_states: [T, H] bfloat16.
        topk_ids: [T, K] int32.
        kept: The last results. Every provider allocates its own: were they freed at once, the next
            call would write to the same lines of L2.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    kept: Permuted | None = field(default=None, repr=False)


def make_inputs(
    case: FinalizeCase, num_tokens: int, copies: int, *, device: torch.device | str
) -> list[PermuteInputs]:
    """Return ``copies`` calls on buffers of their own, K distinct experts a token at random."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (copies, num_tokens)
    hidden = torch.empty(*shape, case.hidden_dim, dtype=torch.bfloat16, device=device)
    hidden.normal_(generator=generator)
    scores = torch.rand(*shape, case.num_experts, generator=generator, device=device)
    ids = scores.topk(case.top_k).indices.int()
    return [PermuteInputs(hidden[i], ids[i]) for i in range(copies)]


def torch_permute(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> Permuted:
    """The same from torch's operations, none of which waits for the device."""
    ids = topk_ids.view(-1)
    in_order, slots = torch.sort(ids, stable=True)
    rows = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    row_of = torch.empty_like(rows).scatter_(0, slots, rows)
    experts = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(in_order, experts, right=True, out_int32=True)
    return hidden_states[slots // topk_ids.shape[1]], row_of.view_as(topk_ids), ends


def routing(x: PermuteInputs, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the oracle's row of each slot and end of each expert, on the inputs' device."""
    ids = x.topk_ids.cpu()
    no_columns = torch.empty(ids.shape[0], 0)  # it goes slot by slot; only the order is wanted
    _, row_of, ends = reference_permute.moe_permute(no_columns, ids, num_experts)
    return row_of.to(x.topk_ids.device), ends.to(x.topk_ids.device)


def check(name: str, got: Permuted, x: PermuteInputs, want: tuple[Tensor, Tensor]) -> None:
    """Compare the routing with the oracle's, and the row of every slot with its token's.

    Raises:
        WrongResultError: a bit differs.
    """
    for what, have, oracle in zip(("row_of", "offsets"), got[1:], want, strict=True):
        if not torch.equal(have, oracle):
            raise WrongResultError(f"{name}: {what} differs from the oracle")
    for k in range(x.topk_ids.shape[1]):  # one slot a token: a copy of all rows may find no room
        if not torch.equal(got[0][want[0][:, k].long()], x.hidden_states):
            raise WrongResultError(f"{name}: rows of slot {k} differ from their tokens'")


def _enter(
    name: str,
    permute: Permutation,
    num_experts: int,
    inputs: Sequence[PermuteInputs],
    want: tuple[Tensor, Tensor],
) -> Contestant:
    def call_of(x: PermuteInputs) -> Call:
        def call() -> None:
            x.kept = permute(x.hidden_states, x.topk_ids, num_experts)

        return call

    calls = [call_of(x) for x in inputs]

    def run_and_check() -> None:
        calls[0]()
        assert inputs[0].kept is not None
        check(name, inputs[0].kept, inputs[0], want)

    return Contestant(calls, run_and_check)


def permutations(case: FinalizeCase, num_tokens: int) -> dict[str, Permutation]:
    """Return the providers for a shape, by name, ours first; then our paths, chosen by force."""
    found: dict[str, Permutation] = {"sgl_moe_jit": moe_permute}
    num_slots = num_tokens * case.top_k
    for path, most_slots in _MOST_SLOTS.items():
        fits = path is not PermutePath.ONE_LAUNCH or case.num_experts <= _ONE_LAUNCH_EXPERTS
        if num_slots <= most_slots and fits:
            found[_name_of(path)] = functools.partial(_forced, path)
    return {**found, "torch": torch_permute}


def _name_of(path: PermutePath) -> str:
    return f"sgl_moe_jit, {path.name.lower().replace('_', ' ')}"


def _forced(
    path: PermutePath, hidden_states: Tensor, topk_ids: Tensor, num_experts: int
) -> Permuted:
    return permute_on(path, hidden_states, topk_ids, num_experts, 1)


def bench(options: Options, contest: Contest) -> Iterator[list[Record]]:
    """Yield the records of one shape after another: bfloat16 rows, int32 ids."""
    wanted = options.choose(dict.fromkeys(["sgl_moe_jit", *map(_name_of, _MOST_SLOTS), "torch"]))
    cache = finalize.l2_bytes()
    for case in options.cases:
        for num_tokens in options.tokens or TOKENS:
            there = permutations(case, num_tokens)
            chosen = {name: there[name] for name in wanted if name in there}
            size = permute_bytes(num_tokens, case.top_k, case.hidden_dim, 2, 4)
            for mode in finalize.modes_of(num_tokens, options.modes):
                past = cache if mode == "cold" else None
                copies = copies_for_cold(size, past) if past else 1
                inputs = make_inputs(case, num_tokens, copies, device="cuda")
                want = routing(inputs[0], case.num_experts)
                contestants: dict[str, Callable[[], Contestant]] = {
                    name: functools.partial(_enter, name, permute, case.num_experts, inputs, want)
                    for name, permute in chosen.items()
                }
                shape = f"{case.name}, {num_tokens} tokens, {mode}"
                outcomes = contest.on_cuda(shape, contestants)
                del inputs, contestants
                yield [
                    Record.of("permute", case, num_tokens, mode, name, outcome, size, past)
                    for name, outcome in outcomes.items()
                ]
