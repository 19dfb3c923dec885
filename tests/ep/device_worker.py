# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each process checks of dispatch and block on GPUs: over NCCL, or gloo through the host."""

import torch
import torch.distributed as dist

from sgl_moe_jit.ep.dispatch import TorchDispatcher
from sgl_moe_jit.ep.home import HomeExpander
from sgl_moe_jit.ep.layout import EpLayout
from sgl_moe_jit.moe.block import SharedExpertMoEBlock
from sgl_moe_jit.moe.dispatch import ExpertParallelPath
from tests.ep.ep_cases import FixedGate, H, SharedMlp, Whole, check_output, choose, random

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


def run(rank, store, ranks, backend):
    """Entry of one process: NCCL with one rank a GPU, or gloo with all of them on the first."""
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    modes = [{"sum_at": "source"}, {"sum_at": "experts"}]
    if backend == "gloo":
        modes = [mode | {"stage_through_host": True} for mode in modes]
    else:
        modes.append({"sum_at": "experts", "max_tokens_per_rank": 7})
    try:
        with torch.no_grad():
            check(dist.group.WORLD, device, modes)
            if backend == "nccl":
                check_capture(dist.group.WORLD, device)
    finally:
        dist.destroy_process_group()
