# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that a runner is given: a wrong activation, none at all."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.runners import create_runner
from tests.moe.runner_cases import RUNNERS, make_input, make_topk, make_weights


@pytest.mark.parametrize("num_tokens", [0, 16])
@pytest.mark.parametrize("name", RUNNERS)
def test_an_activation_of_another_width_is_named(name, num_tokens):
    weights = replace(make_weights(), activation=torch.nn.functional.silu, is_silu_and_mul=False)
    with pytest.raises(ValueError, match=r"activation: expected 16 columns, .* from 32, got 32"):
        create_runner(name, weights).run(make_input(num_tokens), make_topk(num_tokens))


def test_weights_that_are_none_are_named():
    with pytest.raises(TypeError, match="weights: expected ExpertWeights or FlashInferWeights"):
        create_runner("auto", torch.nn.Linear(2, 2))
