# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Under autocast a layer's output has the weights' dtype, whichever way it was computed."""

from __future__ import annotations

import pytest
import torch

from sgl_moe_jit.moe.runners import all_experts, create_runner
from tests.moe.fp8_cases import make_fp8_weights
from tests.moe.runner_cases import BF16, F32, make_input, make_topk, make_weights

pytestmark = pytest.mark.field_report("A14")
F16 = torch.float16


def both(runner, x, topk):
    return runner.run(x, topk, defer=False), runner.run(x, topk, defer=True).finalize()


@pytest.mark.parametrize("way", ["native", "grouped_mm", "all_experts"])
@pytest.mark.parametrize(("dtype", "autocast"), [(F32, BF16), (BF16, F16)])
@pytest.mark.parametrize("num_tokens", [0, 5])
@torch.no_grad()
def test_the_dtype_is_the_weights(way, dtype, autocast, num_tokens, monkeypatch):
    monkeypatch.setattr(all_experts, "serves", lambda *_: num_tokens and way == "all_experts")
    runner = create_runner("native" if way == "native" else "grouped_mm", make_weights(dtype=dtype))
    x, topk = make_input(num_tokens, dtype=dtype), make_topk(num_tokens)
    plain = both(runner, x, topk)
    with torch.autocast("cpu", autocast):
        got = both(runner, x, topk)
    assert [y.dtype for y in got] == [dtype, dtype]
    if way != "native":  # whose GEMMs torch converts
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@torch.no_grad()
def test_fp8_experts_compute_the_same_and_take_what_a_norm_widened():
    runner = create_runner("native", make_fp8_weights())
    x, topk = make_input(5, dtype=BF16), make_topk(5)
    want = runner.run(x, topk, defer=False)
    with torch.autocast("cpu", BF16):
        got = runner.run(x, topk, defer=False)
        widened = runner.run(x.float(), topk, defer=False)
    assert torch.equal(got, want) and torch.equal(widened, want)
