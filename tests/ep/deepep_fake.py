# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""A ``deep_ep.Buffer`` on ranks that are threads: it binds every call to a recorded signature,
checks what the docstrings ask of arguments, and answers as they say, or with one thing changed."""

import torch

from tests.ep import deepep_signatures

RECORDED = deepep_signatures.recorded()
VERSIONS = sorted(RECORDED)


class FakeBuffer:
    """Args: group, version, and ``spoil``: {method: function from its answer to a changed one}."""

    def __init__(self, group, version=VERSIONS[-1], spoil=None):
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        self.signatures = RECORDED[version]
        self.spoil = spoil or {}
        self.calls = []

    def _bind(self, name, args, kwargs):
        self.calls.append(name)
        bound = self.signatures[name].bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        assert not given.get("async_finish") and not given.get("return_recv_hook")
        return given

    def _answer(self, name, answer):
        return self.spoil.get(name, lambda x: x)(answer)

    def _check_ids(self, ids, num_experts):
        assert ids.dtype == torch.int64 and ids.dim() == 2 and ids.is_contiguous()
        assert ids.shape[0] > 0, "an empty tensor"
        assert num_experts % self.group_size == 0
        assert int(ids.min()) >= -1 and int(ids.max()) < num_experts

    def _layout(self, ids, num_experts):
        slots = num_experts // self.group_size
        owner = torch.where(ids < 0, -1, ids // slots)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.group_size)], 1)
        per_expert = torch.bincount(ids[ids >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), per_expert, in_rank

    def get_dispatch_layout(self, *args, **kwargs):
        given = self._bind("get_dispatch_layout", args, kwargs)
        ids, num_experts = given["topk_idx"], given["num_experts"]
        self._check_ids(ids, num_experts)
        per_rank, per_expert, in_rank = self._layout(ids, num_experts)
        answer = (per_rank, None, per_expert, in_rank, object())
        return self._answer("get_dispatch_layout", answer)

    def dispatch(self, *args, **kwargs):
        given = self._bind("dispatch", args, kwargs)
        x, ids, weights = given["x"], given["topk_idx"], given["topk_weights"]
        num_experts = given["num_tokens_per_expert"].numel()
        self._check_ids(ids, num_experts)
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and weights.is_contiguous()
        assert weights.dtype == torch.float32 and weights.shape == ids.shape
        want = self._layout(ids, num_experts)
        names = ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")
        for name, tensor in zip(names, want, strict=True):
            assert torch.equal(given[name], tensor), name
        slots = num_experts // self.group_size
        everybody = self.group.world.meet(self.rank, (x.clone(), ids, weights))
        rows, local, scales, origin = [], [], [], []
        for source, (xs, all_ids, all_weights) in enumerate(everybody):
            for token in range(xs.shape[0]):
                mine = torch.where(all_ids[token] // slots == self.rank, all_ids[token] % slots, -1)
                mine = torch.where(all_ids[token] < 0, -1, mine)
                if (mine >= 0).any():
                    rows.append(xs[token])
                    local.append(mine)
                    scales.append(torch.where(mine >= 0, all_weights[token], 0.0))
                    origin.append((source, token))
        for _ in range(len(rows), given["num_worst_tokens"]):
            rows.append(torch.full_like(x[0], float("nan")))
            local.append(torch.full_like(ids[0], -1))
            scales.append(torch.full_like(weights[0], float("nan")))
        counts = torch.zeros(slots, dtype=torch.int64)
        answer = (
            torch.stack(rows) if rows else x.new_empty((0, x.shape[1])),
            torch.stack(local) if rows else ids.new_empty((0, ids.shape[1])),
            torch.stack(scales) if rows else weights.new_empty((0, ids.shape[1])),
            [] if given["num_worst_tokens"] else counts.tolist(),
            ("normal", origin, x.shape),
            object(),
        )
        return self._answer("dispatch", answer)

    def combine(self, *args, **kwargs):
        given = self._bind("combine", args, kwargs)
        x, (kind, origin, shape) = given["x"], given["handle"]
        assert kind == "normal" and x.dtype == torch.bfloat16 and x.is_contiguous()
        total = torch.zeros(shape, dtype=torch.float32)
        for rows, origins in self.group.world.meet(self.rank, (x.clone(), origin)):
            for row, (source, token) in zip(rows, origins, strict=False):
                if source == self.rank:
                    total[token] += row.float()
        return self._answer("combine", (total.bfloat16(), None, object()))

    def low_latency_dispatch(self, *args, **kwargs):
        given = self._bind("low_latency_dispatch", args, kwargs)
        x, ids, num_experts = given["x"], given["topk_idx"], given["num_experts"]
        most = given["num_max_dispatch_tokens_per_rank"]
        self._check_ids(ids, num_experts)
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] <= most
        assert not given["use_fp8"]
        slots = num_experts // self.group_size
        rows = torch.full((slots, most * self.group_size, x.shape[1]), float("nan")).bfloat16()
        counts, origin = torch.zeros(slots, dtype=torch.int32), {}
        for source, (xs, all_ids) in enumerate(self.group.world.meet(self.rank, (x.clone(), ids))):
            for token, k in (all_ids >= 0).nonzero().tolist():
                rank, slot = divmod(int(all_ids[token, k]), slots)
                if rank == self.rank:
                    rows[slot, counts[slot]] = xs[token]
                    origin[slot, int(counts[slot])] = (source, token, k)
                    counts[slot] += 1
        answer = (rows, counts, ("low latency", origin, ids), object(), None)
        return self._answer("low_latency_dispatch", answer)

    def low_latency_combine(self, *args, **kwargs):
        given = self._bind("low_latency_combine", args, kwargs)
        x, (kind, origin, ids) = given["x"], given["handle"]
        assert kind == "low latency" and x.dtype == torch.bfloat16 and x.is_contiguous()
        assert torch.equal(given["topk_idx"], ids)
        assert given["topk_weights"].dtype == torch.float32
        total = torch.zeros(ids.shape[0], x.shape[2])
        for rows, origins in self.group.world.meet(self.rank, (x.clone(), origin)):
            for (slot, place), (source, token, k) in origins.items():
                if source == self.rank:
                    total[token] += given["topk_weights"][token, k] * rows[slot, place].float()
        return self._answer("low_latency_combine", (total.bfloat16(), object(), None))
