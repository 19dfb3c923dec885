# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A ``deep_ep.Buffer`` that answers otherwise than its docstrings say: each break by its name."""

import pytest
import torch

from sgl_moe_jit.ep.deepep import DeepEPDispatcher
from sgl_moe_jit.errors import UnsupportedError
from tests.ep.deepep_fake import FakeBuffer
from tests.ep.ep_cases import H
from tests.ep.thread_ranks import run_ranks

BF16 = torch.bfloat16
MODES = {
    "normal": {},
    "low_latency": {"mode": "low_latency", "num_max_dispatch_tokens_per_rank": 7},
}


def changed(part, change):
    """A function that changes one part of an answer."""

    def spoil(answer):
        parts = list(answer)
        parts[part] = change(parts[part])
        return tuple(parts)

    return spoil


def nothing(x):
    return None


BREAKS = [  # mode, method, what it does, what the error says
    ("normal", "get_dispatch_layout", lambda a: a[:4], "expected a tuple of 5, got one of 4"),
    (
        "normal",
        "get_dispatch_layout",
        changed(0, torch.Tensor.long),
        r"num_tokens_per_rank \[1\] o",
    ),
    ("normal", "get_dispatch_layout", changed(2, nothing), r"num_tokens_per_expert \[2\] .* NoneT"),
    (
        "normal",
        "get_dispatch_layout",
        changed(3, torch.Tensor.int),
        r"is_token_in_rank \[3, 1\] of",
    ),
    ("normal", "dispatch", list, "expected a tuple of 6, got list"),
    ("normal", "dispatch", changed(0, torch.Tensor.float), r"recv_x \[any, 16\] of torch.bfloat16"),
    ("normal", "dispatch", changed(0, lambda x: (x, x)), r"recv_x .*, got tuple"),
    (
        "normal",
        "dispatch",
        changed(1, torch.Tensor.int),
        r"recv_topk_idx \[3, 2\] of torch.int64, g",
    ),
    (
        "normal",
        "dispatch",
        changed(1, lambda x: x + 2),
        "local expert ids below 2 in recv_topk_idx",
    ),
    (
        "normal",
        "dispatch",
        changed(2, nothing),
        r"recv_topk_weights \[3, 2\] of torch.float32, got N",
    ),
    ("normal", "dispatch", changed(4, nothing), "expected a handle, got None"),
    ("normal", "combine", lambda a: a[0], "expected a tuple of 3, got Tensor"),
    (
        "normal",
        "combine",
        changed(0, lambda x: x[:1]),
        r"combined rows \[3, 16\] .*, got \[1, 16\]",
    ),
    (
        "low_latency",
        "low_latency_dispatch",
        changed(0, lambda x: (x, x)),
        r"recv_x \[2, 7, 16\] of",
    ),
    ("low_latency", "low_latency_dispatch", changed(0, lambda x: x[:, :3]), r"got \[2, 3, 16\] of"),
    ("low_latency", "low_latency_dispatch", changed(1, torch.Tensor.long), r"recv_count \[2\] of"),
    ("low_latency", "low_latency_dispatch", lambda a: a[:3], "expected a tuple of 5, got one of 3"),
    ("low_latency", "low_latency_combine", lambda a: a[:2], "expected a tuple of 3, got one of 2"),
    (
        "low_latency",
        "low_latency_combine",
        changed(0, torch.Tensor.float),
        "of torch.bfloat16, got",
    ),
]


@pytest.mark.parametrize(
    ("mode", "method", "spoil", "text"), BREAKS, ids=[f"{b[1]}-{i}" for i, b in enumerate(BREAKS)]
)
def test_a_buffer_that_breaks_its_word_is_named(monkeypatch, mode, method, spoil, text):
    def call(group):
        dispatcher = DeepEPDispatcher(FakeBuffer(group, spoil={method: spoil}), 2, **MODES[mode])
        ids = torch.tensor([[0, 1], [1, -1], [0, -1]])
        rows = dispatcher.dispatch(torch.ones(3, H, dtype=BF16), ids, torch.ones(3, 2))
        dispatcher.combine(rows.hidden_states, rows)

    _, errors, _ = run_ranks(monkeypatch, 1, call)
    with pytest.raises(UnsupportedError, match=rf"deep_ep.Buffer.{method}: .*{text}"):
        raise errors[0]
