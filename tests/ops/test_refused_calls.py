# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""On a CPU nothing is allocated for a call that is refused, though its output were petabytes.

Sizes come from strides of 0. Were the output made first, torch's words about memory would be seen.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_moe_jit.ops import (
    count_tokens_per_rank,
    ep_topk,
    expand_topk_with_shared_expert,
    moe_finalize_fuse_shared_add_rmsnorm,
    moe_finalize_fuse_shared_add_rmsnorm_fp8,
    moe_permute,
    silu_and_mul,
    waterfill_topk_with_shared_expert,
)
from sgl_moe_jit.ops.finalize_arguments import check_factor


def vast(rows, columns, *, side_by_side=True, dtype=torch.float32):
    return torch.zeros(1, columns if side_by_side else 1, dtype=dtype).expand(rows, columns)


def direct(function, *arguments, **options):
    return function(*arguments, **options)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def through_the_dispatcher(function, *arguments, **options):
    with Passing():
        return function(*arguments, **options)


both_ways = pytest.mark.parametrize("way", [direct, through_the_dispatcher])


@both_ways
@pytest.mark.parametrize(
    ("x", "text"),
    [
        (vast(2**40, 4), r"x: expected fewer than 2\^31 rows"),
        (vast(2**30, 2**20, side_by_side=False), "x: expected adjacent columns"),
        (vast(2**30, 2**26, side_by_side=False), "x: expected adjacent columns"),
    ],
)
def test_activation(way, x, text):
    with pytest.raises(ValueError, match=text):
        way(silu_and_mul, x)


IDS = vast(2**24, 8, dtype=torch.int32)


@both_ways
@pytest.mark.parametrize(
    ("x", "ids", "kind", "text"),
    [
        (
            vast(2**24, 2**20),
            vast(2**24, 8, dtype=torch.float64),
            TypeError,
            "topk_ids: expected int32 or int64",
        ),
        (vast(2**24, 2**20, side_by_side=False), IDS, ValueError, "hidden_states: expected adja"),
        (vast(2**24, 2**22, side_by_side=False), IDS, ValueError, "hidden_states: expected adja"),
        (vast(2**24, 2**24), IDS, ValueError, "hidden_states: expected at most 8388480 columns"),
    ],
)
def test_permute(way, monkeypatch, x, ids, kind, text):
    copied = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copied.append(x) or contiguous(x))
    with pytest.raises(kind, match=text):
        way(moe_permute, x, ids, 4)
    assert not copied  # of the ids: 512 MB


@pytest.mark.parametrize(
    "op", [moe_finalize_fuse_shared_add_rmsnorm, moe_finalize_fuse_shared_add_rmsnorm_fp8]
)
@pytest.mark.parametrize(
    ("way", "given"),
    [
        (direct, {}),
        (through_the_dispatcher, {}),
        (direct, {"residual_out": torch.zeros(3, 32).bfloat16()}),
    ],
)
def test_norm(way, op, given):
    rows, idx = torch.zeros(8, 32).bfloat16(), torch.zeros(3, 2, dtype=torch.int32)
    weights, norm = torch.ones(3, 2), torch.ones(32).bfloat16()
    residual = vast(2**42, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"residual: expected \[3, 32\], got \[4398046511104, 32"):
        way(op, rows, idx, weights, None, 2, residual, norm, 1e-6, **given)


@both_ways
@pytest.mark.parametrize("op", [expand_topk_with_shared_expert, waterfill_topk_with_shared_expert])
@pytest.mark.parametrize(
    ("ids", "weights", "kind", "text"),
    [
        (torch.zeros(3, 2).int(), torch.ones(3, 2).double(), TypeError, "topk_weights: expected f"),
        (torch.zeros(2, 3).int().t(), torch.ones(2, 2), ValueError, "topk_weights: expected the s"),
        (torch.zeros(2, 3).t(), torch.ones(3, 2), TypeError, "topk_ids: expected int32 or int64"),
        (torch.full((3, 2), 8), torch.ones(3, 2), ValueError, "topk_ids: expected ids below 8"),
    ],
)
def test_ids_for_dispatch(monkeypatch, way, op, ids, weights, kind, text):
    def refuse(*arguments):
        raise AssertionError("something was allocated")

    monkeypatch.setattr(ep_topk, "outputs", refuse)
    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    with pytest.raises(kind, match=text):
        way(op, ids, weights, 8, 4, 0)


def test_count(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    with pytest.raises(TypeError, match="topk_ids: expected int32 or int64"):
        count_tokens_per_rank(vast(2**26, 7), 8, 4, 0)


def test_permute_refuses_in_a_trace_what_it_refuses_in_a_call():
    with FakeTensorMode(), pytest.raises(ValueError, match="at most 8388480 columns"):
        moe_permute(torch.zeros(1, 8388481), torch.zeros(1, 1, dtype=torch.int32), 1)


@pytest.mark.parametrize(("factor", "bits"), [(2**63, 65), (-(2**63) - 1, 65), (2**200, 202)])
def test_the_bits_of_a_refused_int_count_its_sign(factor, bits):
    with pytest.raises(ValueError, match=f"at most 64 bits, got an int of {bits} bits"):
        check_factor(factor)
