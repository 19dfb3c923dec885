# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Router logits: which go to FlashInfer's routing kernel, and what it leaves owed."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.deferred import finalize_output
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.router_config import RouterConfig
from tests.moe.flashinfer_cases import (
    BF16,
    FORMATS,
    ROUTERS,
    E,
    assert_right,
    local,
    make_input,
    make_logits,
)
from tests.moe.flashinfer_fake import make_runner

field_report = pytest.mark.field_report
NEW = "0.7.4"
UNKNOWN = {
    "sqrtsoftplus": RouterConfig(16, 3, "sqrtsoftplus"),
    "groups": RouterConfig(16, 3, "softmax", n_group=4, topk_group=2, group_rule="max"),
    "epsilon": RouterConfig(16, 3, "sigmoid", renormalize=True, renormalize_epsilon=1e-3),
}


LOGITS_CASES = [
    *((Quantization.NONE, NEW, method, 8 * (method % 4 == 0)) for method in ROUTERS),
    *((quantization, "0.6.18", 2, 8) for quantization in FORMATS),
    (Quantization.NVFP4, "0.6.15", 2, 0),
    (Quantization.FP8_BLOCK, "0.6.16", 6, 0),
]


@pytest.mark.parametrize(("quantization", "version", "method", "offset"), LOGITS_CASES)
@field_report("C7")
def test_router_logits_go_to_the_kernel(quantization, version, method, offset):
    runner, layer, fake = make_runner(quantization, version, local_expert_offset=offset)
    x, output = make_input(quantization), make_logits(ROUTERS[method])
    deferred, finished = (runner.run(x, output, defer=defer) for defer in (True, False))
    name, arguments = fake.calls[-1]
    assert not name.endswith("routed_moe") and arguments["routing_method_type"] == method
    assert arguments["num_experts"] == 16 and arguments["local_expert_offset"] == offset
    assert arguments["local_num_experts"] == E
    assert deferred.expert_weights.dtype == BF16
    # Only the DeepSeek kernel applies the factor; else the handle owes it.
    owed = 1.0 if method == 2 else ROUTERS[method].routed_scaling_factor
    assert deferred.routed_scaling_factor == owed
    want = local(output.to_standard(), offset)
    assert_right(deferred.finalize(), layer.plain, x, want, bf16_weights=True)
    if owed == 1.0:
        assert torch.equal(finished, deferred.finalize())
    else:  # rounded before and after the factor, each time by 2^-8
        torch.testing.assert_close(finished, deferred.finalize(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("why", UNKNOWN)
def test_router_logits_that_no_kernel_knows_are_routed_in_torch(why, caplog):
    quantization = Quantization.MXFP4
    runner, layer, fake = make_runner(quantization, local_expert_offset=4)
    x, output = make_input(quantization), make_logits(UNKNOWN[why])
    with caplog.at_level("INFO", "sgl_moe_jit.moe"):
        for _ in range(2):
            got = finalize_output(runner.run(x, output, defer=True))
    assert fake.calls[-1][0].endswith("routed_moe")
    assert_right(got, layer.plain, x, local(output.to_standard(), 4), bf16_weights=True)
    assert len([r for r in caplog.records if "routed in torch" in r.message]) <= 1


def test_padded_tokens_are_routed_in_torch():
    runner, _, _ = make_runner(Quantization.NONE)
    output = replace(make_logits(ROUTERS[6]), num_token_non_padded=2)
    got = runner.run(make_input(Quantization.NONE), output, defer=True)
    assert (got.expanded_idx_to_permuted_idx[2:] == -1).all()
    assert not got.finalize()[2:].any()
