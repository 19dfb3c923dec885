# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One MoE layer spread over ranks, and its whole in float64 from plain loops."""

from dataclasses import dataclass

import torch

from sgl_moe_jit.moe.layer import FusedMoE
from sgl_moe_jit.moe.topk import StandardTopKOutput

H, WIDTH = 16, 8


def random(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


@dataclass
class Whole:
    """The layer: routed experts w13 [E, 2I, H], w2 [E, H, I], and S shared slots likewise."""

    w13: torch.Tensor
    w2: torch.Tensor
    shared_w13: torch.Tensor
    shared_w2: torch.Tensor

    @classmethod
    def make(cls, experts, num_shared=1, dtype=torch.float32):
        return cls(
            random(1, experts, 2 * WIDTH, H).to(dtype),
            random(2, experts, H, WIDTH).to(dtype),
            random(3, num_shared, 2 * WIDTH, H).to(dtype),
            # much larger than a routed expert: counted twice, or not at all, it cannot be missed
            (8 * random(4, num_shared, H, WIDTH)).to(dtype),
        )

    def fused(self, layout, rank, to_logical=None):
        """One rank's routed experts with the shared slots behind them."""
        first = rank * layout.num_local_routed
        mine = torch.arange(first, first + layout.num_local_routed)
        if to_logical is not None:
            mine = to_logical[mine]
        w13, w2 = [self.w13[mine]], [self.w2[mine]]
        if layout.num_shared:
            w13, w2 = [*w13, self.shared_w13], [*w2, self.shared_w2]
        return FusedMoE.from_w13_w2(torch.cat(w13), torch.cat(w2))


class SharedMlp(torch.nn.Module):
    """The shared slots as one module that counts its calls."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.calls = whole, 0

    def forward(self, x):
        self.calls += 1
        total = 0
        for up, down in zip(self.whole.shared_w13, self.whole.shared_w2, strict=True):
            gate, linear = (x @ up.t()).chunk(2, -1)
            total = total + (torch.nn.functional.silu(gate) * linear) @ down.t()
        return total


def expert(up, down, row):
    """One expert on one row, float64."""
    gate, linear = (up.double() @ row.double()).chunk(2)
    return down.double() @ (gate * torch.sigmoid(gate) * linear)


def oracle(whole, x, ids, weights, factor=1.0, magnitude=False):
    """``factor * routed + shared`` of each row; a row without experts has no shared one either.

    ``magnitude``: the sum of the terms' magnitudes, for tolerances.
    """
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        present = [(int(e), float(w)) for e, w in zip(ids[t], weights[t], strict=True) if e >= 0]
        terms = [factor * w * expert(whole.w13[e], whole.w2[e], x[t]) for e, w in present]
        if present:
            shared = zip(whole.shared_w13, whole.shared_w2, strict=True)
            terms += [expert(up, down, x[t]) for up, down in shared]
        for term in terms:
            out[t] += term.abs() if magnitude else term
    return out


def check_output(got, whole, x, ids, weights, factor=1.0, roundings=8):
    """Compare with the oracle.

    Each expert passes a first GEMM, an activation and a second one, the sum a few more: some
    ``roundings`` of a term of typical size in the dtype at hand, with the dot products' own growth
    (H and WIDTH are 16 and 8 terms, kept wide in bfloat16 GEMMs). One expert missed is a term.
    """
    want = oracle(whole, x, ids, weights, factor)
    size = oracle(whole, x, ids, weights, factor, magnitude=True)
    unit = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24 * 16}[got.dtype]
    allowed = roundings * unit * torch.maximum(size, size.mean(-1, keepdim=True))
    assert got.shape == x.shape
    error = (got.double() - want).abs()
    assert (error <= allowed).all(), f"{float((error / allowed.clamp(min=1e-30)).max()):.3g} of it"


def home_expand(layout, rank):
    """What ``HomeExpander`` does, from the layout alone."""

    def expand(topk_ids, topk_weights, shared_weight):
        ids = layout.to_dispatch(topk_ids)
        live = (topk_ids >= 0).any(1, keepdim=True)
        slots = [layout.shared_id(rank, s) for s in range(layout.num_shared)]
        shared = torch.tensor(slots, dtype=ids.dtype).expand(ids.shape[0], -1)
        ids = torch.cat((ids.masked_fill(~live, -1), shared.masked_fill(~live, -1)), 1)
        weights = torch.cat((topk_weights, topk_weights.new_full(shared.shape, shared_weight)), 1)
        return ids, weights.masked_fill(ids < 0, 0.0)

    return expand


def choose(seed, num_tokens, experts, top_k, absent=0.0):
    """Distinct experts a token, some of them absent, and weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, experts, generator=generator)
    ids = scores.argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=generator) < absent] = -1
    return ids, torch.rand(ids.shape, generator=generator)


class FixedGate(torch.nn.Module):
    """A gate whose choice is given."""

    def __init__(self, ids, weights, factor=1.0):
        super().__init__()
        self.output = StandardTopKOutput(weights, ids, factor)

    def forward(self, x):
        assert x.shape[0] == self.output.topk_ids.shape[0]
        return self.output
