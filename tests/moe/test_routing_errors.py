# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What a router configuration and select_experts refuse: kind and text."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.router_config import RouterConfig
from sgl_moe_jit.moe.routing import select_experts
from tests.moe.routing_cases import CONFIGS, E, K, config

V3 = CONFIGS["sigmoid_groups"]
LOGITS, BIAS = torch.zeros(3, E), torch.zeros(E)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (ValueError, {"num_experts": 0}, "num_experts: expected 1 or more, got 0"),
        (TypeError, {"top_k": 2.0}, "top_k: expected an int, got float"),
        (TypeError, {"top_k": True}, "top_k: expected an int, got bool"),
        (ValueError, {"top_k": 65}, "top_k: expected at most 64, the experts in 1 of 1 groups"),
        (ValueError, {"score_function": "tanh"}, "score_function: expected one of .*'sigmoid'"),
        (ValueError, {"group_rule": "mean"}, "group_rule: expected one of .*'top2_sum', 'max'"),
        (ValueError, {"epsilon_kind": "sub"}, "epsilon_kind: expected one of"),
        (ValueError, {"logits_dtype": "bfloat16"}, "logits_dtype: expected one of"),
        (ValueError, {"scores_dtype": "model"}, "scores_dtype: expected one of"),
        (ValueError, {"weights_dtype": "bf16"}, "weights_dtype: expected one of"),
        (ValueError, {"n_group": 7}, "n_group: expected a divisor of num_experts 64, got 7"),
        (ValueError, {"n_group": 8, "topk_group": 9}, "topk_group: expected at most 8, got 9"),
        (ValueError, {"n_group": 16, "topk_group": 1}, "top_k: expected at most 4, the experts"),
        (ValueError, {"weight_on_input": True}, "top_k: expected 1, since weight_on_input"),
        (
            ValueError,
            {"score_after_top_k": True, "has_correction_bias": True},
            "score_after_top_k: chooses on the logits alone",
        ),
        (
            ValueError,
            {"score_after_top_k": True, "n_group": 8, "topk_group": 4},
            "score_after_top_k: chooses on the logits alone",
        ),
        (ValueError, {"renormalize_epsilon": -1.0}, "renormalize_epsilon: expected 0 or more"),
        (ValueError, {"routed_scaling_factor": 0.0}, "routed_scaling_factor: expected a finite"),
        (
            ValueError,
            {"routed_scaling_factor": float("inf")},
            "routed_scaling_factor: expected a finite factor, 1.0 for none, got inf",
        ),
    ],
)
def test_a_config_that_no_family_means(kind, changes, text):
    with pytest.raises(kind, match=text):
        config(**changes)


def test_who_owns_the_factor():
    assert RouterConfig(8, 2, "softmax", routed_scaling_factor=2.0).due_scaling_factor == 1.0
    due = RouterConfig(8, 2, "softmax", routed_scaling_factor=2.0, scale_in_weights=False)
    assert due.due_scaling_factor == 2.0


def test_logits():
    with pytest.raises(TypeError, match=r"logits: expected a floating dtype, got torch\.int64"):
        select_experts(LOGITS.long(), V3, BIAS)
    for logits in (torch.zeros(3, E - 1), torch.zeros(E), torch.zeros(2, 3, E)):
        with pytest.raises(ValueError, match=r"logits: expected \[num_tokens, 64\], got \("):
            select_experts(logits, V3, BIAS)


# LongCat's bias had an entry for each expert with weights, and none for the zero experts.
@pytest.mark.field_report("A9")
def test_correction_bias():
    wide = config(num_experts=768, top_k=12, has_correction_bias=True)
    with pytest.raises(ValueError, match=r"correction_bias: expected \[768\], got \(512,\)"):
        select_experts(torch.zeros(3, 768), wide, torch.zeros(512))
    with pytest.raises(ValueError, match="correction_bias: expected a tensor for this RouterConf"):
        select_experts(LOGITS, V3)
    with pytest.raises(ValueError, match="correction_bias: expected None for this RouterConfig"):
        select_experts(LOGITS, CONFIGS["softmax"], BIAS)
    for dtype in (torch.bfloat16, torch.float16, torch.int32):
        with pytest.raises(TypeError, match=r"correction_bias: expected float32, got torch\."):
            select_experts(LOGITS, V3, BIAS.to(dtype))


def test_expert_scale():
    scaled = CONFIGS["softmax_expert_scale"]
    with pytest.raises(ValueError, match="expert_scale: expected a tensor for this RouterConfig"):
        select_experts(LOGITS, scaled)
    with pytest.raises(ValueError, match="expert_scale: expected None for this RouterConfig"):
        select_experts(LOGITS, V3, BIAS, expert_scale=BIAS)
    with pytest.raises(ValueError, match=r"expert_scale: expected \[64\], got \(1, 64\)"):
        select_experts(LOGITS, scaled, expert_scale=BIAS[None])


def test_topk_ids():
    for ids in (torch.zeros(3, K + 1).long(), torch.zeros(2, K).long(), torch.zeros(3, K).short()):
        with pytest.raises(ValueError, match=r"topk_ids: expected int32 or int64 \[3, 6\], got "):
            select_experts(LOGITS, CONFIGS["softmax"], topk_ids=ids)
    with pytest.raises(ValueError, match="correction_bias: expected None"):
        select_experts(LOGITS, V3, BIAS, topk_ids=torch.zeros(3, K).long())


def test_num_token_non_padded():
    for count in (torch.zeros(2).long(), torch.zeros(()), torch.zeros((), dtype=torch.bool)):
        with pytest.raises(ValueError, match="num_token_non_padded: expected one integer, got tor"):
            select_experts(LOGITS, V3, BIAS, num_token_non_padded=count)
    meta = torch.zeros((), dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="num_token_non_padded: expected device cpu like the log"):
        select_experts(LOGITS, V3, BIAS, num_token_non_padded=meta)
    one = torch.ones(1, dtype=torch.int32)
    output = select_experts(LOGITS, V3, BIAS, num_token_non_padded=one)
    assert output.topk_ids[1:].tolist() == [[-1] * K] * 2


@pytest.mark.gpu
def test_a_count_on_the_cpu_is_refused_where_a_graph_would_freeze_it():
    with pytest.raises(ValueError, match="expected device cuda:0 like the logits, got cpu"):
        select_experts(
            LOGITS.cuda(), V3, BIAS.cuda(), num_token_non_padded=torch.ones((), dtype=torch.int32)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [None, torch.bfloat16])
def test_the_dtype_of_the_weights(dtype, hidden):
    logits = torch.randn(3, E).to(dtype)

    def weights(**changes):
        routing = replace(CONFIGS["softmax"], **changes)
        return select_experts(logits, routing, hidden_dtype=hidden).topk_weights.dtype

    assert weights() == torch.float32
    assert weights(weights_dtype="logits") == dtype
    assert weights(weights_dtype="hidden") == (hidden or torch.float32)
