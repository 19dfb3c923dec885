# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""PDL of the kernels on top-k ids: routing, expanding, counting and the waterfill."""

import pytest
import torch

from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.ops import count_tokens_per_rank, expand_topk_with_shared_expert
from sgl_moe_jit.ops.route_topk import route_topk
from sgl_moe_jit.ops.waterfill import waterfill_on
from sgl_moe_jit.ops.waterfill_kernel import WaterfillCall, WaterfillPath
from tests.ops.ep_topk_cases import make_ids, make_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
        reason="PDL needs sm_90",
    ),
]

RUNS = 500  # times two inputs: 1000 runs a path


def check(pdl, x, old, run):
    """The producer lets ``run`` start, sleeps, then writes x; old data would show in every run."""
    new = x.clone()
    want = run()
    assert not all(map(torch.equal, want, run_with(x, old, run))), "the inputs must matter"
    consumed = [torch.empty_like(y) for y in want]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS):
        x.copy_(old)
        pdl.produce_late(x, new)
        for seen, y, right in zip(consumed, run(), want, strict=True):
            pdl.consume(seen, y)  # M11: a consumer that waits sees our output
            wrong += (seen != right).sum()
    assert int(wrong) == 0


def run_with(x, old, run):
    new = x.clone()
    x.copy_(old)
    got = run()
    x.copy_(new)
    return got


@pytest.mark.field_report("M10")
@pytest.mark.field_report("M11")
@pytest.mark.parametrize("late", ["logits", "bias"])
@pytest.mark.parametrize("experts", [64, 256])
def test_routing(pdl, late, experts):
    config = RouterConfig(experts, 8, "sigmoid", has_correction_bias=True, renormalize=True)
    logits = torch.randn(40, experts, device="cuda")
    bias = torch.randn(experts, device="cuda")
    x = {"logits": logits, "bias": bias}[late]
    options = config.kernel_options
    check(pdl, x, x.flip(-1).contiguous(), lambda: route_topk(logits, options, bias))


@pytest.mark.field_report("M10")
@pytest.mark.field_report("M11")
@pytest.mark.parametrize("late", ["ids", "weights"])
def test_expanding(pdl, late):
    ids = make_ids(300, 64, 8).cuda()
    weights = make_weights(ids.cpu()).cuda()
    x = {"ids": ids, "weights": weights}[late]
    old = x.flip(0).contiguous()
    check(pdl, x, old, lambda: expand_topk_with_shared_expert(ids, weights, 64, 8, 3))


@pytest.mark.field_report("M10")
@pytest.mark.field_report("M11")
@pytest.mark.parametrize("num_tokens", [300, 5000])
def test_counting(pdl, num_tokens):
    ids = make_ids(num_tokens, 64, 8, skew=3).cuda()
    old = (63 - ids).contiguous()
    check(pdl, ids, old, lambda: tuple(count_tokens_per_rank(ids, 64, 8, 3)))


@pytest.mark.field_report("M10")
@pytest.mark.field_report("M11")
@pytest.mark.parametrize("late", ["ids", "weights"])
@pytest.mark.parametrize("path", list(WaterfillPath))
@pytest.mark.parametrize("mode", ["exact", "exact_restricted", "sampled"])
def test_waterfill(pdl, late, path, mode):
    ids = make_ids(200, 64, 8, skew=3).cuda()
    weights = make_weights(ids.cpu()).cuda()
    x = {"ids": ids, "weights": weights}[late]
    call = WaterfillCall(ids, weights, 64, 8, 3, 0.4, mode, None, None, 0, None)
    check(pdl, x, x.flip(0).contiguous(), lambda: waterfill_on(path, call))
