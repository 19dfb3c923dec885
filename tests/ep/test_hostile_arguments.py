# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Arguments of another kind or out of range are refused by name, when and where they are given."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sgl_moe_jit.ep import (
    DeepEPDispatcher,
    EpLayout,
    ExpertCounts,
    HomeExpander,
    SharedExpertFusionConfig,
    TorchDispatcher,
    WaterfillBalancer,
    determine_num_fused_shared_experts,
    drop_shared_counts,
    fused_shared_expert_weight,
    get_moe_weights,
    is_deepep_class_backend,
    logical_to_physical_table,
    mark_global_experts,
    to_physical,
)
from sgl_moe_jit.ep.trace import record_routing
from sgl_moe_jit.ep.trace_file import RoutingTrace, load_trace
from sgl_moe_jit.ops import waterfill_topk_with_shared_expert as waterfill

LAYOUT = EpLayout(8, ep_size=4)
IDS, TABLE = torch.tensor([[0, 7]]), torch.arange(8)
ROWS = torch.zeros(1, 4)
GROUP = SimpleNamespace(size=lambda: 4, rank=lambda: 0)
BUFFER = SimpleNamespace(
    group_size=4,
    get_dispatch_layout=None,
    dispatch=None,
    combine=None,
    low_latency_dispatch=None,
    low_latency_combine=None,
)
WEIGHTS, ZEROS = torch.ones(1, 2), torch.zeros(4, dtype=torch.int64)

CASES = {
    "group": (lambda: TorchDispatcher(3, 2), TypeError, "group: expected a process group, got int"),
    "mark": (lambda: mark_global_experts(None), TypeError, "tensor: expected a Tensor, got NoneTy"),
    "fusion": (
        lambda: determine_num_fused_shared_experts(None),
        TypeError,
        "config: expected a SharedExpertFusionConfig, got NoneType",
    ),
    "record": (
        lambda: record_routing(None, model_name="x").__enter__(),
        TypeError,
        "model: expected a torch.nn.Module, got NoneType",
    ),
    # ids are int32, and what comes out of a larger layout would wrap
    "slots": (lambda: EpLayout(2**30, 0, 512, 2**22), ValueError, "fewer than 2^31 slots"),
    "ids": (lambda: LAYOUT.to_dispatch(1.0), TypeError, "ids: expected an integer or a tensor"),
    "rank": (lambda: LAYOUT.shared_id(1.0), TypeError, "rank: expected an int, got float"),
    "slot": (lambda: LAYOUT.shared_id(1, True), TypeError, "s: expected an int, got bool"),
    "home": (lambda: HomeExpander(None, 0), TypeError, "layout: expected an EpLayout"),
    "home rank": (lambda: HomeExpander(LAYOUT, 0.0), TypeError, "rank: expected an int"),
    "home slots": (
        lambda: HomeExpander(EpLayout(8, num_shared=0), 0),
        ValueError,
        "layout: expected num_shared of at least 1, got 0",
    ),
    "balancer rank": (lambda: WaterfillBalancer(LAYOUT, "1"), TypeError, "rank: expected an int"),
    "balancer mode": (
        lambda: WaterfillBalancer(LAYOUT, 0, mode=["exact"]),
        ValueError,
        "mode: expected one of exact",
    ),
    "balancer start": (
        lambda: WaterfillBalancer(LAYOUT, 0, remainder_start=1.5),
        TypeError,
        "remainder_start: expected an int, got float",
    ),
    "balancer dynamic": (
        lambda: WaterfillBalancer(LAYOUT, 0, dynamic="no"),
        TypeError,
        "dynamic: expected a bool, got 'no'",
    ),
    # a dynamic one would find out behind its all-reduce
    "balancer least": (
        lambda: WaterfillBalancer(LAYOUT, 0, min_tokens="a"),
        TypeError,
        "min_tokens: expected an int, got str",
    ),
    "balancer least -1": (
        lambda: WaterfillBalancer(LAYOUT, 0, min_tokens=-1),
        ValueError,
        "min_tokens: expected at least 0, got -1",
    ),
    "op mode": (lambda: waterfill(IDS, WEIGHTS, 8, 4, 0, mode=[]), ValueError, "mode: expected"),
    "op least": (
        lambda: waterfill(IDS, WEIGHTS, 8, 4, 0, min_tokens=-1),
        ValueError,
        "min_tokens: expected at least 0, got -1",
    ),
    # home needs no counts, and wrong ones would be found from min_tokens rows on
    "op counts dtype": (
        lambda: waterfill(
            *(IDS, WEIGHTS, 8, 4, 0),
            mode="sampled",
            global_counts=ZEROS.float(),
            tokens_per_rank=ZEROS,
        ),
        TypeError,
        "global_counts: expected int64, got torch.float32",
    ),
    "op counts shape": (
        lambda: waterfill(
            *(IDS, WEIGHTS, 8, 4, 0), min_tokens=2, global_counts=ZEROS, tokens_per_rank=ZEROS[:3]
        ),
        ValueError,
        "tokens_per_rank: expected [world_size=4], got (3,)",
    ),
    "fusion size": (
        lambda: SharedExpertFusionConfig(ep_size=2.5),
        TypeError,
        "ep_size: expected an int, got float",
    ),
    "fusion slots": (
        lambda: SharedExpertFusionConfig(num_shared_experts="1"),
        TypeError,
        "num_shared_experts: expected an int, got str",
    ),
    "fusion obstacle": (
        lambda: SharedExpertFusionConfig(obstacle=None),
        TypeError,
        "obstacle: expected a str, got None",
    ),
    "backend": (lambda: is_deepep_class_backend([]), ValueError, "backend: expected one of"),
    "factor": (lambda: fused_shared_expert_weight("2.5", True), TypeError, "number or None, got"),
    "tiny factor": (lambda: fused_shared_expert_weight(1e-320, False), ValueError, "inverse"),
    "all-reduce": (
        lambda: fused_shared_expert_weight(2.5, False, all_reduce_ep_size=1.5),
        TypeError,
        "all_reduce_ep_size: expected an int",
    ),
    "table ids": (lambda: to_physical([[0]], TABLE), TypeError, "topk_ids: expected a Tensor"),
    "table": (lambda: to_physical(IDS, [0]), TypeError, "table: expected a Tensor, got list"),
    "table columns": (
        lambda: to_physical(IDS, TABLE, num_shared_columns=1.0),
        TypeError,
        "num_shared_columns: expected an int",
    ),
    "table first": (
        lambda: to_physical(IDS, TABLE, first_token=0.5),
        TypeError,
        "first_token: expected an int",
    ),
    "table padding": (
        lambda: to_physical(IDS, TABLE, num_token_non_padded=0.5),
        TypeError,
        "num_token_non_padded: expected an int, got float",
    ),
    # one number a row would have masked columns
    "table paddings": (
        lambda: to_physical(IDS, TABLE, num_token_non_padded=torch.tensor([1, 0])),
        ValueError,
        "num_token_non_padded: expected one integer",
    ),
    # its second token would have got -1, though the expert has two replicas
    "table gap": (
        lambda: to_physical(IDS, torch.tensor([[1, -1, 3]] * 8)),
        ValueError,
        "table: expected the replicas of each expert, at least one, from column 0 on",
    ),
    "table int32": (
        lambda: to_physical(IDS.int(), TABLE + 2**32),
        ValueError,
        "table: expected slots that torch.int32 ids can name, got 4294967303",
    ),
    "table of none": (lambda: logical_to_physical_table(None), TypeError, "layout: expected an"),
    "counts of none": (lambda: ExpertCounts(None), TypeError, "layout: expected an EpLayout"),
    "counts": (lambda: ExpertCounts(LAYOUT).add_routed([1]), TypeError, "ids: expected a Tensor"),
    "local counts": (
        lambda: ExpertCounts(LAYOUT).add_local(1, ZEROS[:2].cfloat()),
        TypeError,
        "counts: expected integers, got torch.complex64",
    ),
    "counts' tail": (
        lambda: drop_shared_counts(torch.zeros(3), 2, True),
        TypeError,
        "num_trailing_shared_slots: expected an int, got bool",
    ),
    "counts list": (lambda: drop_shared_counts([1], 1, 0), TypeError, "counts: expected a Tensor"),
    "slots of a rank": (
        lambda: TorchDispatcher(GROUP, 2.0),
        TypeError,
        "num_local_experts: expected an int, got float",
    ),
    "capacity": (
        lambda: TorchDispatcher(GROUP, 2, sum_at="experts", max_tokens_per_rank=1.5),
        TypeError,
        "max_tokens_per_rank: expected an int, got float",
    ),
    "through the host": (
        lambda: TorchDispatcher(GROUP, 2, stage_through_host="no"),
        TypeError,
        "stage_through_host: expected a bool, got 'no'",
    ),
    "dispatched": (
        lambda: TorchDispatcher(GROUP, 3).dispatch(ROWS.tolist(), IDS, WEIGHTS),
        TypeError,
        "hidden_states: expected a Tensor, got list",
    ),
    "DeepEP slots": (
        lambda: DeepEPDispatcher(BUFFER, True),
        TypeError,
        "num_local_experts: expected an int, got bool",
    ),
    "DeepEP mode": (lambda: DeepEPDispatcher(BUFFER, 2, mode=[]), ValueError, "mode: expected"),
    "DeepEP top_k": (
        lambda: DeepEPDispatcher(BUFFER, 2, max_top_k=0),
        ValueError,
        "max_top_k: expected at least 1, got 0",
    ),
    "DeepEP worst": (
        lambda: DeepEPDispatcher(BUFFER, 2, num_worst_tokens=1.5),
        TypeError,
        "num_worst_tokens: expected an int, got float",
    ),
    "DeepEP most": (
        lambda: DeepEPDispatcher(
            BUFFER, 2, mode="low_latency", num_max_dispatch_tokens_per_rank=1.5
        ),
        TypeError,
        "num_max_dispatch_tokens_per_rank: expected an int, got float",
    ),
    "DeepEP ids": (
        lambda: DeepEPDispatcher(BUFFER, 2, topk_idx_dtype=torch.float32),
        TypeError,
        "topk_idx_dtype: expected torch.int32 or torch.int64, got torch.float32",
    ),
    "experts": (
        lambda: get_moe_weights(torch.nn.Linear(2, 2)),
        TypeError,
        "experts: expected a module with num_local_experts, got Linear",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name):
    call, kind, text = CASES[name]
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)


def test_counts_made_in_inference_mode_count_outside_of_it():
    with torch.inference_mode():
        counts = ExpertCounts(LAYOUT)
    counts.add_routed(IDS)
    assert counts.counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_the_mark_of_global_experts_is_where_its_docstring_says(tmp_path):
    marked = mark_global_experts(torch.nn.Parameter(torch.zeros(2)))
    torch.save(marked, tmp_path / "marked")
    loaded = torch.load(tmp_path / "marked", weights_only=False)
    assert loaded.holds_global_experts
    assert torch.nn.ParameterList([marked]).to(torch.float64)[0].holds_global_experts
    assert not hasattr(copy.deepcopy(marked), "holds_global_experts")


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (None, "calls: expected at least one, got none"),
        # cut to 16 bits, as the file has them, it would read as expert 3
        (np.full((1, 2), 65536 + 3, np.int32), r"from -1 to 7 of a, got .* from 65539 to 65539"),
        (np.full((1, 3), 1, np.int32), r"expected \[T, 2\] integers"),
        (np.full((1, 2), 1.0), r"expected \[T, 2\] integers .* of float64"),
    ],
)
def test_a_trace_that_could_not_be_read_is_not_written(tmp_path, ids, text):
    calls = () if ids is None else (("a", ids),)
    with pytest.raises(ValueError, match=text):
        RoutingTrace("toy", 8, 2, calls).save(tmp_path / "toy.npz")
    assert not (tmp_path / "toy.npz").exists()
    RoutingTrace("toy", 8, 2, (("a", np.zeros((0, 2), np.int32)),)).save(tmp_path / "toy.npz")
    assert load_trace(tmp_path / "toy.npz").calls[0][1].shape == (0, 2)
