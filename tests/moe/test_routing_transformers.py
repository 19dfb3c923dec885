# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Our routing against transformers' own routers, family by family."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit.moe.config import MoEConfig
from sgl_moe_jit.moe.routing import router_logits, select_experts
from sgl_moe_jit.moe.topk_selection import apply_scores
from tests.moe.hf_routers import FAMILIES, HIDDEN, build

pytest.importorskip("transformers")
BF16, F32 = torch.bfloat16, torch.float32
NUM_TOKENS = 4096
# Their sum runs over K weights in the order of `torch.topk(sorted=True)`, which is ours: every bit
# is the same. Elsewhere the reference sums in an order that torch does not specify.
SORTED = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "olmoe", "mixtral", "gpt_oss", "llama4",
    "hunyuan_v1_moe", "ernie4_5_moe", "gemma4", "lfm2_moe",
    # no sum
    "deepseek_v2", "deepseek_v2_lite", "longcat_flash",
}  # fmt: skip
INTEGER = {F32: torch.int32, BF16: torch.int16}


def ulps(a, b):
    """Units in the last place between positive floats of one dtype."""
    assert a.dtype == b.dtype
    integer = INTEGER[a.dtype]
    return (a.contiguous().view(integer).long() - b.contiguous().view(integer).long()).abs()


def by_id(ids, weights):
    order = ids.long().sort(-1)
    return order.values, weights.gather(-1, order.indices)


class Comparison:
    """One family's router and ours on the same rows."""

    def __init__(self, name, dtype):
        built = build(name, dtype)
        layer_idx = 1 if name == "nemotron_h" else 3
        self.routing = MoEConfig.from_hf(built.config, layer_idx).router
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            self.hf_logits, self.hf_weights, self.hf_ids = built.run(x)
            if name == "gemma4":  # its input is normed and scaled inside the router
                router = built.router
                x = router.norm(x) * router.scale * router.scalar_root_size
            self.logits = router_logits(x, built.gate, self.routing, built.gate_bias)
            if name == "gemma4":  # it returns probabilities for logits
                self.hf_logits = router.proj(x)
        self.bias = None if built.bias is None else built.bias.detach().float()
        self.others = {"expert_scale": built.scale, "hidden_dtype": dtype}
        self.ours = select_experts(self.logits, self.routing, self.bias, **self.others)

    def choice(self):
        """The values that the choice was made on."""
        if self.routing.score_after_top_k:
            return self.logits.float()
        scores = apply_scores(self.logits, self.routing)
        return scores if self.bias is None else scores + self.bias

    def ours_of_their_ids(self):
        """Our weights for the reference's ids, summed in its order of slots."""
        routing = replace(self.routing, has_correction_bias=False)
        return select_experts(self.logits, routing, topk_ids=self.hf_ids, **self.others)


@pytest.fixture(scope="module", params=[F32, BF16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def compared(request, dtype):
    return Comparison(request.param, dtype)


@pytest.mark.field_report("A1")
def test_the_gate_computes_in_the_dtype_of_the_reference(compared):
    assert compared.logits.dtype == compared.hf_logits.dtype
    assert torch.equal(compared.logits, compared.hf_logits)


@pytest.mark.field_report("A1")
@pytest.mark.field_report("A5")
def test_the_same_experts_on_every_row(compared):
    """Where the sets differ, what differs is tied at the boundary, and ours are the lower ids."""
    ours, theirs = compared.ours.topk_ids.long(), compared.hf_ids
    choice = compared.choice()
    differing = (ours.sort(-1).values != theirs.sort(-1).values).any(-1).nonzero().flatten()
    if compared.logits.dtype == F32 and compared.routing.scores_dtype == "float32":
        assert differing.numel() == 0
    assert differing.numel() < NUM_TOKENS // 20
    for t in differing.tolist():
        mine, other = set(ours[t].tolist()), set(theirs[t].tolist())
        values = {float(choice[t, e]) for e in mine ^ other}
        assert len(values) == 1, f"row {t}: {sorted(mine)} against {sorted(other)}: no tie"
        tied = (choice[t] == values.pop()).nonzero().flatten().tolist()
        chosen = [e for e in tied if e in mine]
        assert chosen == tied[: len(chosen)], f"row {t}: {chosen} of the tied {tied}"


def test_the_same_weights_by_id(compared, request):
    """To one ulp, with the K weights summed in the reference's order."""
    got = compared.ours_of_their_ids().topk_weights
    assert got.dtype == compared.hf_weights.dtype
    name, top_k = request.node.callspec.params["compared"], compared.routing.top_k
    # DBRX sums by `torch.norm`, whose order is its own: see the next test.
    allowed = top_k + 2 if name == "dbrx" and got.dtype == F32 else 1
    assert int(ulps(got, compared.hf_weights).max()) <= allowed


def test_the_order_of_the_sum_is_all_that_differs(compared, request):
    ids, weights = by_id(compared.ours.topk_ids, compared.ours.topk_weights)
    hf_ids, hf_weights = by_id(compared.hf_ids, compared.hf_weights)
    same = (ids == hf_ids).all(-1)
    distance = ulps(weights[same], hf_weights[same])
    name = request.node.callspec.params["compared"]
    if name in SORTED:
        assert int(distance.max()) == 0
    else:
        # K - 1 additions in two orders, a half ulp each at most, then a division and a product.
        assert int(distance.max()) <= compared.routing.top_k + 2


def test_the_factor_has_one_owner(compared, request):
    name = request.node.callspec.params["compared"]
    after_the_experts = {"minimax_m3_vl": 2.0, "step3p7": 3.0}
    assert compared.ours.routed_scaling_factor == after_the_experts.get(name, 1.0)


def test_hash_layers_weigh_the_ids_of_their_table():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(**FAMILIES["deepseek_v4"].settings, vocab_size=50)
    router = modeling.DeepseekV4HashRouter(config)
    with torch.no_grad():
        router.weight.normal_(0, 0.2)
        router.tid2eid.copy_(torch.rand(50, config.n_routed_experts).argsort(-1)[:, :6])
    tokens, x = torch.randint(0, 50, (64,)), torch.randn(64, HIDDEN)
    _, weights, ids = router(x, tokens)
    moe = MoEConfig.from_hf(config, layer_idx=0)
    assert moe.hash_layers == (0, 1, 2) and not moe.router.has_correction_bias
    ours = select_experts(router_logits(x, router.weight, moe.router), moe.router, topk_ids=ids)
    assert torch.equal(ours.topk_ids.long(), ids)
    assert int(ulps(ours.topk_weights, weights).max()) <= 1
