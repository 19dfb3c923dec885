# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``to_float32`` on a GPU: every value of 16 bits, and calls for which torch's own cast is kept."""

import pytest
import torch
from torch.autograd import forward_ad

from sgl_moe_jit.moe.widen import to_float32

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_keeps_its_bits(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    want = every.double().float()  # on the CPU
    got = to_float32(every.to("cuda")).cpu()
    assert got.dtype == torch.float32
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


def test_gradients_strides_and_wider_values_are_kept():
    x = torch.randn(6, 8, device="cuda", dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    to_float32(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(x))
    assert torch.equal(to_float32(x[:, ::2]), x[:, ::2].float())
    wide = x.float()
    assert to_float32(wide) is wide
    assert to_float32(x[:0]).shape == (0, 8)
    with torch.autocast("cuda", dtype=torch.float16):
        assert to_float32(x).dtype == torch.float32


def test_a_graph_captures_it():
    x = torch.randn(6, 8, device="cuda", dtype=torch.bfloat16)
    to_float32(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = to_float32(x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x.float())


def test_forward_mode_goes_through_torchs_cast():
    x = torch.randn(6, 8, device="cuda", dtype=torch.bfloat16)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(to_float32(forward_ad.make_dual(x, x)))
    assert torch.equal(dual.tangent, x.float())
