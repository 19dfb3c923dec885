# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
r"""Every CUDA kernel on small shapes that take each of its paths, for compute-sanitizer.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
    python tests/sanitizer/exercise.py

Each tensor is then an allocation of its own, so that an access beyond it is seen; and every result
is compared with the CPU's bits.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts
from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    expand_topk_with_shared_expert,
    silu_and_mul,
)
from sgl_moe_jit.ops.permute import permute_on
from sgl_moe_jit.ops.permute_kernel import PermutePath
from sgl_moe_jit.ops.waterfill_kernel import MODES, WaterfillPath, can_take_one_launch
from tests.ops import finalize_norm_cases as norm_cases
from tests.ops import waterfill_cases
from tests.ops.ep_topk_cases import assert_same, make_ids, make_weights
from tests.ops.finalize_cases import BF16, F16, F32, assert_same_bits, make


def finalize() -> int:
    count = 0
    # scalar; 4, then 8 bytes alone fit; each launch shape by size (on some 130 multiprocessors)
    sizes = ((5, 515), (5, 1030), (5, 1028), (1, 512), (90, 2048), (210, 2048), (600, 2048))
    for dtype, weight_dtype in ((BF16, F32), (F16, None), (F32, BF16)):
        for top_k, gate in ((8, None), (3, F32), (64, F32)):
            for num_tokens, hidden in sizes:
                if top_k == 64 and num_tokens > 100:
                    continue
                x = make(
                    num_tokens,
                    top_k,
                    hidden,
                    padded=hidden + 8,
                    dtype=dtype,
                    weight_dtype=weight_dtype,
                    shared=gate is not None or num_tokens != 5,
                    gate=gate,
                    factor=2.5,
                )
                assert_same_bits(x.to("cuda").run().cpu(), x.run())
                count += 1
    return count


def finalize_norm() -> int:
    count = 0
    # each size of cluster and both kernels; vectors of 16 and 8 bytes, scalar; the widest rows
    for num_tokens in (1, 20, 40, 60, 150, 300):
        for hidden in (7168, 2052, 515) if num_tokens < 150 else (1024, 515):
            for dtype in (BF16, F32):
                for fp8 in (False, True):
                    x = norm_cases.make(num_tokens, 3, hidden, padded=hidden + 8, dtype=dtype)
                    norm_cases.assert_same_bits(x.to("cuda").run(fp8), x.run(fp8))
                    count += 1
    for num_tokens, hidden in ((140, 4104), (3, 8200), (3, 16384), (3, 24575), (3, 24576)):
        x = norm_cases.make(num_tokens, 8, hidden, gate=BF16)
        norm_cases.assert_same_bits(x.to("cuda").run(True), x.run(True))
        count += 1
    for num_tokens, hidden in ((270, 2880), (3, 20480)):  # of float32, in one block each
        x = norm_cases.make(num_tokens, 3, hidden, dtype=F32)
        norm_cases.assert_same_bits(x.to("cuda").run(), x.run())
        count += 1
    return count


def permute() -> int:
    count = 0
    for num_tokens in (1, 7, 64, 300, 3000):
        for num_experts, top_k in ((8, 2), (60, 4), (256, 8)):
            for dtype, hidden in ((BF16, 64), (F32, 33), (BF16, 35)):
                x = torch.randn(num_tokens, hidden).to(dtype)
                ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
                ids[torch.rand(ids.shape) < 0.2] = -1
                for path in PermutePath:
                    if path is PermutePath.ONE_LAUNCH and num_tokens * top_k > 4096:
                        continue
                    for alignment in (1, 16):
                        want = permute_on(path, x, ids, num_experts, alignment)
                        got = permute_on(path, x.cuda(), ids.cuda(), num_experts, alignment)
                        rows = int(want[2][-1])
                        assert torch.equal(got[1].cpu(), want[1])
                        assert torch.equal(got[2].cpu(), want[2])
                        assert torch.equal(got[0][:rows].cpu(), want[0][:rows])
                        count += 1
    return count


def expand_topk() -> int:
    count = 0
    # a block of the count and more; one rank, all the counters there are
    for num_tokens in (1, 70, 5000):
        for experts, ranks, top_k in ((8, 1, 2), (264, 8, 8), (1024, 512, 3)):
            for id_dtype, dtype in ((torch.int32, F32), (torch.int64, BF16)):
                ids = make_ids(num_tokens, experts, top_k, absent=0.2, dtype=id_dtype)
                weights, valid = make_weights(ids, dtype), torch.tensor(60)
                numbers = (experts, ranks, ranks - 1)
                there = ids.cuda(), weights.cuda(), valid.cuda()
                for shared in (1, 3):
                    options = {"num_shared": shared, "num_token_non_padded": valid}
                    want = expand_topk_with_shared_expert(ids, weights, *numbers, **options)
                    options["num_token_non_padded"] = there[2]
                    got = expand_topk_with_shared_expert(*there[:2], *numbers, **options)
                    assert_same(got, want)
                got = count_tokens_per_rank(there[0], *numbers, num_token_non_padded=there[2])
                want = count_tokens_per_rank(ids, *numbers, num_token_non_padded=valid)
                assert torch.equal(got.cpu(), want)
                count += 3
    return count


def waterfill() -> int:
    count = 0
    for world_size in (1, 6, 32, 33, 512):
        for num_tokens in (1, 70, 256, 700):
            for seed in range(3):
                case = waterfill_cases.make(seed, world_size, num_tokens)
                for mode in MODES:
                    want = case.run(mode)
                    for path in WaterfillPath:
                        one = path is WaterfillPath.ONE_LAUNCH
                        if one and not can_take_one_launch(*case.ids.shape, mode):
                            continue
                        assert_same(case.run(mode, "cuda", path), want)
                        count += 1
    return count


def activation() -> int:
    count = 0
    for dtype in (BF16, torch.float16, F32):
        for rows, width in ((1, 8), (5, 64), (33, 7), (200, 1408)):
            x = torch.randn(rows, 2 * width).to(dtype)
            got, want = silu_and_mul(x.cuda()).cpu().double(), silu_and_mul(x).double()
            assert ((got - want).abs() <= 2.0**-7 * want.abs() + 1e-6).all()
            count += 1
    return count


def routing() -> int:
    count = 0
    # each size of kernel and the last lane's end; one weight a lane and two
    for experts in (1, 33, 60, 128, 256, 384, 512, 1000):
        for function, groups, top_k in (
            ("softmax", 1, 1),
            ("sigmoid", 2, 8),
            ("sqrtsoftplus", 4, 40),
        ):
            if experts % groups or top_k > experts // 2:
                continue
            routing = RouterConfig(
                *(experts, top_k, function),
                has_correction_bias=True,
                n_group=groups,
                topk_group=(groups + 1) // 2,
                renormalize=True,
            )
            for dtype in (F32, BF16, F16):
                # the bias is far above roundings, which differ between CPU and CUDA
                logits = torch.stack([torch.randperm(experts) for _ in range(7)]).to(dtype) / 64
                bias, valid = torch.randn(experts), torch.tensor(6)
                want = select_experts(logits, routing, bias, num_token_non_padded=valid)
                there = (logits.cuda(), routing, bias.cuda())
                got = select_experts(*there, num_token_non_padded=valid.cuda())
                assert torch.equal(got.topk_ids.cpu(), want.topk_ids)
                torch.testing.assert_close(
                    got.topk_weights.cpu(), want.topk_weights, rtol=2.0**-14, atol=0
                )
                count += 1
    return count


if __name__ == "__main__":
    counts = f"finalize {finalize()}, finalize_norm {finalize_norm()}, permute {permute()}"
    counts += f", silu_and_mul {activation()}, expand_topk {expand_topk()}"
    counts += f", waterfill {waterfill()}, route_topk {routing()}"
    print(f"{counts} calls: all right")
    torch.cuda.synchronize()
