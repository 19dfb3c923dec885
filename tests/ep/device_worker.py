# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each process checks of dispatch, block and balancer on GPUs, over NCCL or gloo."""

import torch

from sgl_moe_jit.ep.balance import WaterfillBalancer
from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from sgl_moe_jit.ops import reference_waterfill
from tests.ep.ep_cases import FixedGate, H, SharedMlp, Whole, check_output, choose, random
from tests.ops.ep_topk_cases import assert_same, make_ids, make_weights
from tests.process_group import joined

BF16 = torch.bfloat16
TOKENS = (5, 0, 7)  # of rank r in round n: TOKENS[(r + n) % 3]


def run_block(group, whole, num_tokens, mode, device):
    rank, layout = group.rank(), EpLayout(6, ep_size=group.size(), num_shared=2)
    x = (random(20 + rank, num_tokens, H) * H**0.5).to(BF16)
    ids, weights = choose(rank, num_tokens, 6, 3, absent=0.1)
    mlp = SharedMlp(whole)
    gate = FixedGate(ids.to(device), weights.to(device), 2.5)
    experts = whole.fused(layout, rank).to(device)
    block = SharedExpertMoEBlock(gate, experts, mlp, shared_is_fused=True)
    dispatcher = TorchDispatcher(group, layout.num_local, **mode)
    path = ExpertParallelPath(dispatcher, HomeExpander(layout, rank))
    output = block.forward_deepep(x.to(device), path)
    assert output.device == device and mlp.calls == 0
    check_output(output.cpu(), whole, x, ids, weights, 2.5)
    return output


def check(group, device, modes):
    whole = Whole.make(6, 2, BF16)
    for shift in range(3):
        num_tokens = TOKENS[(group.rank() + shift) % 3]
        for mode in modes:
            one, other = (run_block(group, whole, num_tokens, mode, device) for _ in range(2))
            assert torch.equal(one, other)


def check_capture(group, device):
    """A dispatch of a fixed size in a CUDA graph: replays see other tokens, ids and weights."""
    rank, layout = group.rank(), EpLayout(6, ep_size=group.size())
    whole = Whole.make(6, 1, BF16)
    experts = whole.fused(layout, rank).to(device)
    x = torch.zeros(7, H, dtype=BF16, device=device)
    ids, weights = (t.to(device) for t in choose(0, 7, 6, 3))
    block = SharedExpertMoEBlock(FixedGate(ids, weights, 2.5), experts, shared_is_fused=True)
    padded = torch.tensor(7, dtype=torch.int32, device=device)
    mode = {"sum_at": "experts", "max_tokens_per_rank": 7}
    path = ExpertParallelPath(
        TorchDispatcher(group, layout.num_local, **mode), HomeExpander(layout, rank)
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            block.forward_deepep(x, path, num_token_non_padded=padded)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = block.forward_deepep(x, path, num_token_non_padded=padded)
    for step in range(4):
        new_x = (random(50 + 10 * step + rank, 7, H) * H**0.5).to(BF16)
        new_ids, new_weights = choose(70 + 10 * step + rank, 7, 6, 3, absent=0.2)
        x.copy_(new_x), ids.copy_(new_ids), weights.copy_(new_weights), padded.fill_(7 - step)
        graph.replay()
        torch.cuda.synchronize()
        new_ids[7 - step :] = -1
        check_output(output.cpu(), whole, new_x, new_ids, new_weights, 2.5)
        replayed = output.clone()
        assert torch.equal(block.forward_deepep(x, path, num_token_non_padded=padded), replayed)


class Exchange:
    """A balancer that exchanges choices, and what it must give: one greedy pass on a CPU."""

    def __init__(self, group):
        self.group = group
        self.shape = (12, group.size())
        self.capacity = max(TOKENS)
        self.balancer = WaterfillBalancer(
            EpLayout(12, ep_size=group.size()),
            group.rank(),
            mode="exact_restricted",
            group=group,
            dynamic=True,
            max_tokens_per_rank=self.capacity,
        )

    def ids_of(self, rank, num_tokens, seed):
        return make_ids(num_tokens, 12, 3, absent=0.2, seed=seed + rank, skew=6.0)

    def expected(self, sizes, valid, seed):
        """This rank's rows of the oracle's pass over the tokens of all."""
        everybody = torch.full((len(sizes) * self.capacity, 3), -1, dtype=torch.int32)
        for rank, (count, live) in enumerate(zip(sizes, valid, strict=True)):
            first = rank * self.capacity
            everybody[first : first + live] = self.ids_of(rank, count, seed)[:live]
        where = reference_waterfill.restricted(everybody, *self.shape, 0)
        weights = make_weights(everybody)
        first = self.group.rank() * self.capacity
        mine = slice(first, first + sizes[self.group.rank()])
        weights[mine] = make_weights(self.ids_of(self.group.rank(), sizes[self.group.rank()], seed))
        ids, weights = reference_waterfill.expand(everybody, weights, *self.shape, where, 0.4)
        return ids[mine], weights[mine]


def check_exchange(group, device):
    """Sources of other sizes, one of them without tokens; padding in the others."""
    exchange, rank = Exchange(group), group.rank()
    for shift in range(3):
        sizes = [TOKENS[(r + shift) % 3] for r in range(group.size())]
        valid = [max(size - 1, 0) for size in sizes]
        ids = exchange.ids_of(rank, sizes[rank], 90 + shift)
        count = torch.tensor(valid[rank], dtype=torch.int32, device=device)
        got = exchange.balancer(ids.to(device), make_weights(ids).to(device), 0.4, count)
        assert got[0].device == device
        assert_same(got, exchange.expected(sizes, valid, 90 + shift))


def check_exchange_capture(group, device):
    """The exchange in a CUDA graph: replays see other ids, weights and padding of every rank."""
    exchange, rank = Exchange(group), group.rank()
    num_tokens = exchange.capacity
    ids = exchange.ids_of(rank, num_tokens, 0).to(device)
    weights = make_weights(ids.cpu()).to(device)
    count = torch.tensor(num_tokens, dtype=torch.int32, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            exchange.balancer(ids, weights, 0.4, count)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = exchange.balancer(ids, weights, 0.4, count)
    for step in range(4):
        new = exchange.ids_of(rank, num_tokens, 200 + 10 * step)
        ids.copy_(new), weights.copy_(make_weights(new)), count.fill_(num_tokens - step)
        graph.replay()
        torch.cuda.synchronize()
        sizes, valid = ([n] * group.size() for n in (num_tokens, num_tokens - step))
        assert_same(output, exchange.expected(sizes, valid, 200 + 10 * step))


def run(rank, store, ranks, backend):
    """Entry of one process: NCCL with one rank a GPU, or gloo with all of them on the first."""
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    modes = [{"sum_at": "source"}, {"sum_at": "experts"}]
    if backend == "gloo":
        modes = [mode | {"stage_through_host": True} for mode in modes]
    else:
        modes.append({"sum_at": "experts", "max_tokens_per_rank": 7})
    with joined(rank, store, ranks, backend) as group:
        check(group, device, modes)
        check_exchange(group, device)
        if backend == "nccl":
            check_capture(group, device)
            check_exchange_capture(group, device)
