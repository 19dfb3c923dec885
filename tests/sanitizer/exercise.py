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

from sgl_moe_jit.ops import moe_permute, silu_and_mul
from tests.ops.finalize_cases import BF16, F32, assert_same_bits, make


def finalize() -> int:
    count = 0
    for dtype in (BF16, F32):
        for weight_dtype in (F32, BF16):
            for top_k in (8, 3, 16, 64):
                # vector of 8 and 16 bytes, scalar; one block and several; the large launch shape
                for num_tokens, hidden in ((1, 512), (5, 515), (150, 264), (1800, 7168 // 4)):
                    if num_tokens > 1000 and top_k > 8:
                        continue
                    x = make(
                        num_tokens,
                        top_k,
                        hidden,
                        padded=hidden + 8,
                        dtype=dtype,
                        weight_dtype=weight_dtype,
                        shared=top_k != 3,
                        factor=2.5,
                    )
                    assert_same_bits(x.to("cuda").run().cpu(), x.run())
                    count += 1
    large = make(14_000, 2, 7168, dtype=BF16, absent=0.0)  # one block a token, two vectors a thread
    assert_same_bits(large.to("cuda").run().cpu(), large.run())
    return count + 1


def permute() -> int:
    count = 0
    for num_tokens in (1, 7, 64, 300, 3000):
        for num_experts, top_k in ((8, 2), (60, 4), (256, 8)):
            for dtype, hidden in ((BF16, 64), (F32, 33), (BF16, 35)):
                x = torch.randn(num_tokens, hidden).to(dtype)
                ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
                ids[torch.rand(ids.shape) < 0.2] = -1
                want = moe_permute(x, ids, num_experts)
                got = moe_permute(x.cuda(), ids.cuda(), num_experts)
                rows = int(want[2][-1])
                assert torch.equal(got[1].cpu(), want[1]) and torch.equal(got[2].cpu(), want[2])
                assert torch.equal(got[0][:rows].cpu(), want[0][:rows])
                count += 1
    return count


def activation() -> int:
    count = 0
    for dtype in (BF16, F32):
        for rows, width in ((1, 8), (5, 64), (33, 7), (200, 1408)):
            x = torch.randn(rows, 2 * width).to(dtype)
            got, want = silu_and_mul(x.cuda()).cpu().double(), silu_and_mul(x).double()
            assert ((got - want).abs() <= 2.0**-7 * want.abs() + 1e-6).all()
            count += 1
    return count


if __name__ == "__main__":
    counts = f"finalize {finalize()}, permute {permute()}, silu_and_mul {activation()}"
    print(f"{counts} calls: all right")
    torch.cuda.synchronize()
